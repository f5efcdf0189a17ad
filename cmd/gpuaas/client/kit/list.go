package kit

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/exit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/human"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/output"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
)

// Paging are the flags of every list.
type Paging struct {
	Limit int
	Token string
	Watch bool
}

// Flags adds the flags to a command.
func (g *Paging) Flags(cmd *cobra.Command) {
	cmd.Flags().IntVar(&g.Limit, "limit", 0, "at most this many items (default all)")
	cmd.Flags().StringVar(&g.Token, "page-token", "", "go on after an earlier list with --limit: its next_page_token")
	g.WatchFlag(cmd)
}

// WatchFlag adds the flag by which a list is followed, alone: for a list that is no longer than one page.
func (g *Paging) WatchFlag(cmd *cobra.Command) {
	cmd.Flags().BoolVarP(&g.Watch, "watch", "w", false, "print the list, then each row that changes, until Ctrl-C")
}

// Source is where the items of a list come from.
type Source[T proto.Message] struct {
	View  output.View[T]
	Fetch Fetch[T]
	// Changed returns the item in a frame of a watch of the topic. Without a topic a list that is followed is polled.
	Topic   readmodelv1.Topic
	Changed func(*readmodelv1.WatchItem) T
	// Keep reports whether the list's filters let an item of the watch through.
	Keep func(T) bool
}

// Fetch reads a page of a list: at most size items behind a token, and the token of the next page.
type Fetch[T any] = func(ctx context.Context, size int32, token string) ([]T, string, error)

// page is the answer of a method that lists.
type page[T any] interface {
	GetItems() []T
	GetNextPageToken() string
}

// Method returns the function that reads the pages of a list by a method of the API, with a request that has the
// filters.
func Method[Request proto.Message, Answer page[T], T any](call func(context.Context, Request) (Answer, error),
	req Request,
) Fetch[T] {
	return func(ctx context.Context, size int32, token string) ([]T, string, error) {
		fields, m := req.ProtoReflect().Descriptor().Fields(), req.ProtoReflect()
		m.Set(fields.ByName("page_size"), protoreflect.ValueOfInt32(size))
		m.Set(fields.ByName("page_token"), protoreflect.ValueOfString(token))
		answer, err := call(ctx, req)
		return answer.GetItems(), answer.GetNextPageToken(), err
	}
}

// Whole returns the function that reads a list without pages.
func Whole[T any](call func(context.Context) ([]T, error)) Fetch[T] {
	return func(ctx context.Context, _ int32, _ string) ([]T, string, error) {
		items, err := call(ctx)
		return items, "", err
	}
}

// Get calls a method of the API and prints the item that its answer has.
func Get[Request, Answer any, T proto.Message](ctx context.Context, s *Session, v output.View[T],
	call func(context.Context, Request) (Answer, error), req Request, item func(Answer) T,
) error {
	answer, err := call(ctx, req)
	if err != nil {
		return err
	}
	return output.One(s.Printer, v, item(answer))
}

// Show prints a list, and with --watch its changes until the context ends.
func Show[T proto.Message](ctx context.Context, s *Session, page Paging, from Source[T]) error {
	if page.Limit < 0 {
		return exit.Usage(fmt.Errorf("--limit %d: it is 1 or more, or 0 for all", page.Limit))
	}
	if page.Watch {
		switch {
		case s.Format == output.FormatJSON || s.Format == output.FormatYAML:
			return exit.Usage(errors.New("--watch prints one row after another: it goes with -o table, wide, name or jsonl"))
		case page.Token != "":
			return exit.Usage(errors.New("--watch begins with the newest: it goes without --page-token"))
		}
	}
	items, next, err := Pages(ctx, page.Limit, page.Token, from.Fetch)
	if err != nil {
		return err
	}
	if !page.Watch {
		return output.List(s.Printer, from.View, items, next)
	}
	rows := output.NewFollower(s.Printer, from.View)
	if err := rows.Begin(items); err != nil {
		return err
	}
	if from.Topic == readmodelv1.Topic_TOPIC_UNSPECIFIED {
		err = poll(ctx, s, rows, page, from.Fetch)
	} else {
		err = s.Follow(ctx, &readmodelv1.WatchRequest{Topics: []readmodelv1.Topic{from.Topic}}, nil,
			func(changed *readmodelv1.WatchItem) (bool, error) {
				item := from.Changed(changed)
				if !item.ProtoReflect().IsValid() {
					rows.Forget(changed.GetId())
					return false, nil
				}
				if page.Limit > 0 && changed.GetChange() == readmodelv1.Change_CHANGE_SNAPSHOT && !rows.Knows(item) {
					rows.Skip(item) // it existed before, and is not printed
					return false, nil
				}
				return false, rows.Change(item, from.Keep == nil || from.Keep(item))
			})
	}
	if ctx.Err() != nil {
		return exit.Interrupt("interrupted")
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
func poll[T proto.Message](ctx context.Context, s *Session, rows *output.Follower[T], page Paging, fetch Fetch[T],
) error {
	size := int32(listSize)
	if page.Limit > 0 {
		size = int32(min(page.Limit, listSize)) // at most listSize
	}
	pause, warned := listEvery, false
	for {
		if !app.Sleep(ctx, pause) {
			return context.Cause(ctx)
		}
		items, _, err := fetch(ctx, size, "")
		if err != nil {
			if ctx.Err() != nil || !Mends(err) {
				return err
			}
			if !warned {
				human.Note(s.Err, "the list cannot be had (%s); asking again until it can", names.Of(fault.ReasonOf(err)))
			}
			warned, pause = true, min(2*pause, listAtMost)
			continue
		}
		warned, pause = false, listEvery
		for _, item := range slices.Backward(items) {
			if err := rows.Change(item, true); err != nil {
				return err
			}
		}
		rows.Retain(items)
	}
}

// Pages fetches a whole list, or `limit` items of it, from a token on.
func Pages[T any](ctx context.Context, limit int, token string, fetch Fetch[T]) ([]T, string, error) {
	const full = 200
	items := []T{}
	for {
		size := full
		if limit > 0 {
			size = min(full, limit-len(items))
		}
		page, next, err := fetch(ctx, int32(size), token)
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
