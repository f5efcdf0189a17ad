package app_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/gpuaas/mesh/internal/app"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var quiet = slog.New(slog.DiscardHandler)

func untilDone(ctx context.Context) error {
	<-ctx.Done()
	return context.Cause(ctx)
}

func TestRunStopsCleanlyWhenTheCallerCancels(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Hour, cancel)
		if err := app.Run(ctx, quiet, app.Task{Name: "a", Run: untilDone},
			app.Task{Name: "b", Run: func(ctx context.Context) error {
				<-ctx.Done()
				return nil
			}}); err != nil {
			t.Errorf("Run() = %v, want nil", err)
		}
	})
}

func TestFirstFailureStopsTheRestAndIsNamed(t *testing.T) {
	boom := errors.New("boom")
	tests := []struct {
		name string
		run  func(context.Context) error
		want string
	}{
		{"error", func(context.Context) error { return boom }, `task "bad": boom`},
		{"nil before shutdown", func(context.Context) error { return nil }, `task "bad" ended although it was not asked to`},
		{"panic", func(context.Context) error { panic(boom) }, `task "bad": panic: boom`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var seen error
				err := app.Run(t.Context(), quiet,
					app.Task{Name: "good", Run: func(ctx context.Context) error {
						<-ctx.Done()
						seen = context.Cause(ctx)
						return seen
					}},
					app.Task{Name: "bad", Run: tt.run})
				if err == nil || !strings.HasPrefix(err.Error(), tt.want) {
					t.Fatalf("Run() = %v, want prefix %q", err, tt.want)
				}
				if strings.Contains(err.Error(), "good") {
					t.Errorf("the innocent is blamed: %v", err)
				}
				if seen == nil || !strings.Contains(seen.Error(), "bad") {
					t.Errorf("cancel cause %v, want the failure", seen)
				}
				if tt.name == "panic" {
					pe, ok := errors.AsType[*app.PanicError](err)
					if !ok || !strings.Contains(string(pe.Stack), "app_test.go") || !errors.Is(err, boom) {
						t.Errorf("panic without stack or cause: %v", err)
					}
				}
			})
		})
	}
}

func TestFailureDuringShutdownIsReported(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Second, cancel)
		err := app.Run(ctx, quiet, app.Task{Name: "flush", Run: func(ctx context.Context) error {
			<-ctx.Done()
			return errors.New("disk full")
		}})
		if err == nil || err.Error() != `task "flush": disk full` {
			t.Errorf("Run() = %v", err)
		}
	})
}

func TestShutdownOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		var log []string
		note := func(s string) {
			mu.Lock()
			defer mu.Unlock()
			log = append(log, s)
		}
		task := func(name string, phase app.Phase) app.Task {
			return app.Task{
				Name: name, Phase: phase,
				Run: func(ctx context.Context) error {
					<-ctx.Done()
					note("end " + name)
					return nil
				},
				Stop: func(ctx context.Context) error {
					if ctx.Err() != nil {
						t.Errorf("%s: Stop got a dead context", name)
					}
					if _, ok := ctx.Deadline(); !ok {
						t.Errorf("%s: Stop without a deadline", name)
					}
					note("stop " + name)
					return nil
				},
			}
		}
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Second, cancel)
		if err := app.Run(ctx, quiet, task("pool", app.PhasePools), task("loop", 0), task("ready", app.PhaseNotReady),
			task("lease", app.PhaseLeases), task("server", app.PhaseDrain)); err != nil {
			t.Fatal(err)
		}
		want := []string{
			"stop ready", "end ready", "stop server", "end server", "stop loop", "end loop", "stop lease", "end lease",
			"stop pool", "end pool",
		}
		if !slices.Equal(log, want) {
			t.Errorf("order %v", log)
		}
	})
}

// A hook that fails and a drain that hangs must not keep the leases from being released.
func TestAHangingDrainDoesNotKeepLeases(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Second, cancel)
		begin := time.Now()
		var releasedAfter time.Duration
		err := app.Run(ctx, quiet,
			app.Task{Name: "server", Phase: app.PhaseDrain, Stop: func(ctx context.Context) error {
				<-ctx.Done()
				return ctx.Err()
			}},
			app.Task{Name: "lease", Phase: app.PhaseLeases, Stop: func(context.Context) error {
				releasedAfter = time.Since(begin)
				return errors.New("database gone")
			}})
		if releasedAfter == 0 || releasedAfter > 20*time.Second {
			t.Errorf("leases released after %v", releasedAfter)
		}
		if err == nil || !strings.Contains(err.Error(), `stop "server"`) ||
			!strings.Contains(err.Error(), `stop "lease": database gone`) {
			t.Errorf("Run() = %v", err)
		}
	})
}

func TestHardStopNamesWhoHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Second, cancel)
		free := make(chan struct{})
		begin := time.Now()
		err := app.Run(ctx, quiet, app.Task{Name: "deaf", Run: func(context.Context) error { <-free; return nil }},
			app.Task{Name: "good", Run: untilDone})
		if !errors.Is(err, app.ErrHardStop) || !strings.Contains(err.Error(), "deaf") ||
			strings.Contains(err.Error(), "good") {
			t.Errorf("Run() = %v", err)
		}
		if took := time.Since(begin); took != 31*time.Second {
			t.Errorf("took %v, want 1s + 30s", took)
		}
		close(free)
	})
}

func TestRunRefusesBadTasks(t *testing.T) {
	for _, tasks := range [][]app.Task{
		{},
		{{Run: untilDone}},
		{{Name: "a"}},
		{{Name: "a", Run: untilDone}, {Name: "a", Run: untilDone}},
	} {
		if err := app.Run(t.Context(), quiet, tasks...); err == nil {
			t.Errorf("Run(%v): want an error", tasks)
		}
	}
}

func TestSupervise(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		var starts []time.Time
		err := app.Supervise(ctx, quiet, "child", app.Backoff{Min: time.Second, Max: 8 * time.Second, Reset: time.Minute},
			func(ctx context.Context) error {
				starts = append(starts, time.Now())
				switch len(starts) {
				case 1:
					panic("x")
				case 2:
					return nil
				case 8:
					cancel()
					return untilDone(ctx)
				}
				return errors.New("exit 1")
			})
		if err != nil || len(starts) != 8 {
			t.Fatalf("Supervise() = %v after %d starts", err, len(starts))
		}
		for i := 1; i < len(starts); i++ {
			if gap := starts[i].Sub(starts[i-1]); gap < time.Second || gap > 8*time.Second {
				t.Errorf("gap %d is %v", i, gap)
			}
		}
	})
}

func TestEvery(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute+30*time.Second)
		defer cancel()
		rounds := 0
		if err := app.Every(ctx, quiet, "sweep", time.Minute,
			func(context.Context) error { rounds++; return errors.New("no") }); err != nil {
			t.Error(err)
		}
		if rounds < 10 || rounds > 12 {
			t.Errorf("%d rounds", rounds)
		}
		err := app.Every(t.Context(), quiet, "sweep", time.Minute, func(context.Context) error { panic("x") })
		if _, ok := errors.AsType[*app.PanicError](err); !ok {
			t.Errorf("a panic is hidden: %v", err)
		}
	})
}

func TestWithSignals(t *testing.T) {
	ctx, release := app.WithSignals(t.Context(), quiet)
	defer release()
	if err := syscall.Kill(os.Getpid(), syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	<-ctx.Done()
	se, ok := errors.AsType[app.SignalError](context.Cause(ctx))
	if !ok || se.Signal != syscall.SIGTERM || !errors.Is(context.Cause(ctx), app.ErrShutdown) {
		t.Errorf("cause %v", context.Cause(ctx))
	}
}

func TestRepeatedSignals(t *testing.T) {
	tests := []struct {
		name  string
		after []time.Duration // times of the repeated signals, since the first one
		force bool
	}{
		{"child and group at once", []time.Duration{0, 0}, false},
		{"twice in a hurry", []time.Duration{50 * time.Millisecond}, false},
		{
			"until just before the end of the grace",
			[]time.Duration{time.Second, 2 * time.Second, app.RepeatGrace - time.Millisecond},
			false,
		},
		{"after the grace", []time.Duration{app.RepeatGrace}, true},
		{"in a hurry and after the grace", []time.Duration{50 * time.Millisecond, app.RepeatGrace + time.Second}, true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var log bytes.Buffer
				signals := make(chan os.Signal, 2)
				exited, order := make(chan int, 1), make(chan string, 4)
				ctx, release := app.WatchSignals(t.Context(), slog.New(slog.NewTextHandler(&log, nil)), signals,
					func(code int) { exited <- code },
					func(ctx context.Context) error {
						if err := ctx.Err(); err != nil {
							t.Errorf("ending what was started begins with %v", err)
						}
						order <- "first"
						return errors.New("one process does not end")
					},
					func(context.Context) error { order <- "second"; panic("boom") },
					func(context.Context) error { order <- "third"; return nil })
				signals <- syscall.SIGINT
				<-ctx.Done()
				began := time.Now()
				for _, after := range tt.after {
					<-time.After(time.Until(began.Add(after)))
					signals <- syscall.SIGINT
					synctest.Wait()
				}
				if !tt.force {
					select {
					case code := <-exited:
						t.Errorf("exit %d", code)
					default:
					}
					if n := strings.Count(log.String(), "already stopping"); n != 1 {
						t.Errorf("%d lines say that it is stopping:\n%s", n, log.String())
					}
					release()
					return
				}
				if code := <-exited; code != 130 {
					t.Errorf("exit %d, want 130", code)
				}
				close(order)
				var ran []string
				for s := range order {
					ran = append(ran, s)
				}
				if !slices.Equal(ran, []string{"first", "second", "third"}) ||
					strings.Count(log.String(), "left something behind") != 2 {
					t.Errorf("ended %v before the exit:\n%s", ran, log.String())
				}
				release()
			})
		})
	}
}

// A forced stop ends even if the things that it stops do not end.
func TestAForcedStopIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		signals := make(chan os.Signal, 2)
		exited, deaf := make(chan int, 1), make(chan struct{})
		ctx, release := app.WatchSignals(t.Context(), quiet, signals, func(code int) { exited <- code },
			func(context.Context) error { <-deaf; return nil })
		defer release()
		signals <- syscall.SIGTERM
		<-ctx.Done()
		<-time.After(app.RepeatGrace)
		began := time.Now()
		signals <- syscall.SIGTERM
		if code := <-exited; code != 130 || time.Since(began) != app.ForceWithin {
			t.Errorf("exit %d after %s", code, time.Since(began))
		}
		close(deaf)
	})
}
