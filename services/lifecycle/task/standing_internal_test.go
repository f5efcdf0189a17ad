package task

import (
	"context"
	"crypto/ed25519"
	"testing"
	"testing/synctest"
	"time"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/envelope"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/testkit"
)

// TestOffersOfOneMessageNameTheirOwnSessions holds that tasks of one node that were leased to two of its sessions are
// each offered to their own.
func TestOffersOfOneMessageNameTheirOwnSessions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, private, err := ed25519.GenerateKey(nil)
		if err != nil {
			t.Fatal(err)
		}
		key := envelope.NewKey(private)
		s := NewServer(Deps{Logger: testkit.Logger(t), Key: key})
		out, node := newOutlet(), ids.New()
		want := map[string]string{}
		for _, session := range []string{"former", "current"} {
			row := Row{TaskID: ids.New(), Type: "probe.noop", NodeID: node, Attempt: 1, NotBefore: time.Now(), ExpiresAt: time.Now().Add(time.Minute)}
			task := picked{Row: row, session: session, keyID: key.ID()}
			want[task.TaskID] = session
			out.add(task)
		}
		ctx, cancel := context.WithCancel(t.Context())
		got := map[string]string{}
		s.offerStanding(ctx, out, func(res *lifecyclev1.StreamWorkResponse) error {
			for _, task := range res.GetLease().GetTasks() {
				got[task.GetTask().GetTaskId()] = task.GetSessionId()
			}
			cancel()
			return nil
		})
		for id, session := range want {
			if got[id] != session {
				t.Errorf("the task of session %q is offered to %q", session, got[id])
			}
		}
	})
}
