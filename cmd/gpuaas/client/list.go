package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
)

// paging are the flags of every list.
type paging struct {
	limit int
	token string
	watch bool
}

func (g *paging) flags(cmd *cobra.Command) {
	cmd.Flags().IntVar(&g.limit, "limit", 0, "at most this many items (default all)")
	cmd.Flags().StringVar(&g.token, "page-token", "", "go on after an earlier list with --limit: its next_page_token")
	cmd.Flags().BoolVarP(&g.watch, "watch", "w", false, "print the list, then each row that changes, until Ctrl-C")
}

// source is where the items of a list come from.
type source[T proto.Message] struct {
	view  view[T]
	fetch func(ctx context.Context, size int32, token string) ([]T, string, error)
	// changed returns the item in a frame of a watch of the topic. Without a topic a list that is followed is polled.
	topic   readmodelv1.Topic
	changed func(*readmodelv1.WatchItem) T
	// keep reports whether the list's filters let an item of the watch through.
	keep func(T) bool
}

// show prints a list, and with --watch its changes until the context ends.
func show[T proto.Message](ctx context.Context, s *session, page paging, from source[T]) error {
	if page.limit < 0 {
		return Usage(fmt.Errorf("--limit %d: it is 1 or more, or 0 for all", page.limit))
	}
	if page.watch {
		switch {
		case s.format == formatJSON || s.format == formatYAML:
			return Usage(errors.New("--watch prints one row after another: it goes with -o table, wide, name or jsonl"))
		case page.token != "":
			return Usage(errors.New("--watch begins with the newest: it goes without --page-token"))
		}
	}
	items, next, err := pages(page.limit, page.token,
		func(size int32, token string) ([]T, string, error) { return from.fetch(ctx, size, token) })
	if err != nil {
		return err
	}
	if !page.watch {
		return list(s.printer, from.view, items, next)
	}
	rows := newFollower(s.printer, from.view)
	if err := rows.begin(items); err != nil {
		return err
	}
	if from.topic == readmodelv1.Topic_TOPIC_UNSPECIFIED {
		err = poll(ctx, s, rows, page, from.fetch)
	} else {
		err = s.follow(ctx, &readmodelv1.WatchRequest{Topics: []readmodelv1.Topic{from.topic}}, nil,
			func(changed *readmodelv1.WatchItem) (bool, error) {
				item := from.changed(changed)
				if !item.ProtoReflect().IsValid() {
					rows.forget(changed.GetId())
					return false, nil
				}
				if page.limit > 0 && changed.GetChange() == readmodelv1.Change_CHANGE_SNAPSHOT && !rows.knows(item) {
					rows.skip(item) // it existed before, and is not printed
					return false, nil
				}
				return false, rows.change(item, from.keep == nil || from.keep(item))
			})
	}
	if ctx.Err() != nil {
		return interrupted("interrupted")
	}
	return err
}

const (
	// listEvery is the interval at which a list without a watch is polled, and listAtMost the longest interval while polls
	// fail.
	listEvery  = 2 * time.Second
	listAtMost = 30 * time.Second
	// listSize is how many items a poll requests, the newest ones.
	listSize = 200
)

// poll reads the first page of a list at intervals and prints its changes.
func poll[T proto.Message](ctx context.Context, s *session, rows *follower[T], page paging,
	fetch func(context.Context, int32, string) ([]T, string, error),
) error {
	size := int32(listSize)
	if page.limit > 0 {
		size = int32(min(page.limit, listSize)) //nolint:gosec // at most listSize
	}
	pause, told := listEvery, false
	for {
		timer := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			timer.Stop()
			return context.Cause(ctx)
		case <-timer.C:
		}
		items, _, err := fetch(ctx, size, "")
		if err != nil {
			if ctx.Err() != nil || !mends(err) {
				return err
			}
			if !told {
				note(s.err, "the list cannot be had (%s); asking again until it can", names.Of(fault.ReasonOf(err)))
			}
			told, pause = true, min(2*pause, listAtMost)
			continue
		}
		told, pause = false, listEvery
		for _, item := range slices.Backward(items) {
			if err := rows.change(item, true); err != nil {
				return err
			}
		}
		rows.retain(items)
	}
}

// pages fetches a whole list, or `limit` items of it, from a token on.
func pages[T any](limit int, token string, fetch func(size int32, token string) ([]T, string, error)) ([]T, string,
	error,
) {
	const full = 200
	items := []T{}
	for {
		size := full
		if limit > 0 {
			size = min(full, limit-len(items))
		}
		page, next, err := fetch(int32(size), token) //nolint:gosec // at most 200
		if err != nil {
			return nil, "", err
		}
		items = append(items, page...)
		if next == "" || (limit > 0 && len(items) >= limit) {
			return items, next, nil
		}
		if next == token {
			return nil, "", fmt.Errorf("list: the server answered the same page twice: %w", io.ErrUnexpectedEOF)
		}
		token = next
	}
}
