package task_test

import (
	"crypto/ed25519"
	"path/filepath"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpuaas/mesh/agent/ledger"
	"github.com/gpuaas/mesh/agent/task"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/envelope"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/testkit"
)

// An executor whose results are all acknowledged wakes only to prune, and one that has a result without an
// acknowledgement sends it again.
func TestAnExecutorWithoutTasksRests(t *testing.T) {
	testkit.IO(t)
	synctest.Test(t, func(t *testing.T) {
		b := &bench{t: t, node: ids.New(), key: newKey(t), handlers: ours()}
		led, err := ledger.Open(ledger.Config{Path: filepath.Join(t.TempDir(), "ledger")})
		if err != nil {
			t.Fatal(err)
		}
		set, err := envelope.NewVerifierSet([]ed25519.PublicKey{b.key.Public()}...)
		if err != nil {
			t.Fatal(err)
		}
		var asked atomic.Int64 // each wake of the executor reads the server's time
		b.exec, err = task.New(task.Deps{
			Logger: testkit.Logger(t), Ledger: led, Verifiers: func() *envelope.VerifierSet { return set },
			ServerNow: func() (time.Time, bool) { asked.Add(1); return time.Now(), true }, Handlers: b.handlers,
		}, task.Config{NodeID: b.node})
		if err != nil {
			t.Fatal(err)
		}
		b.sink = newSink()
		b.exec.Attach(b.sink)
		done := make(chan struct{})
		go func() { defer close(done); _ = b.exec.Run(t.Context()) }()
		t.Cleanup(func() {
			<-done
			if err := led.Close(); err != nil {
				t.Error(err)
			}
		})
		rests := func(when string) {
			t.Helper()
			synctest.Wait()
			asked.Store(0)
			time.Sleep(time.Hour)
			synctest.Wait()
			if n := asked.Load(); n > 6 {
				t.Errorf("%s the executor woke %d times in an hour; it prunes 6 times", when, n)
			}
		}
		rests("before its first task")
		tk := b.task(noop, &nodev1.ProbeNoop{})
		b.offer(tk)
		time.Sleep(20 * time.Second)
		synctest.Wait()
		if n := b.sink.times(tk.TaskID); n != 2 {
			t.Errorf("a result without an acknowledgement was sent %d times in 20 s; want 2", n)
		}
		ack(t, b, tk.TaskID)
		rests("with its result acknowledged")
	})
}
