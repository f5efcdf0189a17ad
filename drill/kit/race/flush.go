package race

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/gpuaas/mesh/drill/kit/await"
	"github.com/gpuaas/mesh/drill/kit/stage"
)

// Flush races while the lock store is flushed.
func (x *Race) Flush(ctx context.Context) error { return x.Round(ctx, "lock store flushed", x.flushed) }

// flushed flushes the lock store every few milliseconds while the race goes on. The store's own counter is the
// evidence; an imitation has none, and there the confirmed commands are counted.
func (x *Race) flushed(ctx context.Context, run start) error {
	c, err := x.r.Mesh.Cluster()
	if err != nil {
		return err
	}
	options, err := redis.ParseURL(c.Stores.Redis.URL())
	if err != nil {
		return err
	}
	store := redis.NewClient(options)
	defer store.Close() // nothing is lost with it
	before := 0
	if c.Stores.Redis.Real() {
		if before, err = flushes(ctx, store); err != nil {
			return stage.At(stage.Good, err)
		}
	}
	confirmed := 0
	flushing, stop := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() {
		for await.Sleep(flushing, 5*time.Millisecond) == nil {
			if store.FlushAll(flushing).Err() == nil {
				confirmed++
			}
		}
	})
	_, err = run(ctx)
	stop()
	wg.Wait()
	if err != nil {
		return err
	}
	after := confirmed
	if c.Stores.Redis.Real() {
		after, err = flushes(ctx, store)
	}
	if err == nil && after <= before {
		err = errors.New("the lock store was not flushed once")
	}
	if err == nil {
		x.r.Note("the lock store, a %s, was flushed %d times during the race", c.Stores.RedisKind(), after-before)
	}
	return stage.At(stage.Injected, err)
}

// flushes returns how often a store was flushed, by its own counter.
func flushes(ctx context.Context, store *redis.Client) (int, error) {
	info, err := store.Info(ctx, "commandstats").Result()
	if err != nil {
		return 0, fmt.Errorf("ask the lock store: %w", err)
	}
	for text := range strings.Lines(info) {
		if rest, ok := strings.CutPrefix(text, "cmdstat_flushall:calls="); ok {
			count, _, _ := strings.Cut(rest, ",")
			return strconv.Atoi(count)
		}
	}
	return 0, nil
}
