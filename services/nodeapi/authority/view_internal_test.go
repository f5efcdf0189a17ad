package authority

import (
	"context"
	"io"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
)

// A view that is never replaced drops retired nodes after their term, and no other node.
func TestRetiredNodesAreForgotten(t *testing.T) {
	const (
		active  = commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE
		retired = commonv1.NodeIdentityState_NODE_IDENTITY_STATE_RETIRED
	)
	node := func(id string, state commonv1.NodeIdentityState, sequence int64) *recoveryv1.NodeAuthority {
		return &recoveryv1.NodeAuthority{NodeId: id, State: state, Sequence: sequence}
	}
	synctest.Test(t, func(t *testing.T) {
		v := New(slog.New(slog.DiscardHandler), Config{}, nil, func(*recoveryv1.NodeAuthority) {})
		v.replace(map[string]*recoveryv1.NodeAuthority{
			"a": node("a", active, 1), "gone": node("gone", retired, 2), "b": node("b", active, 3),
		}, 3)
		time.Sleep(time.Hour)
		v.apply(node("b", retired, 4))
		v.apply(node("b", retired, 5)) // it does not begin its term anew
		know := func(want ...string) {
			t.Helper()
			for _, id := range []string{"a", "b", "c", "gone"} {
				wanted := false
				for _, w := range want {
					wanted = wanted || w == id
				}
				if got := v.Get(id) != nil; got != wanted {
					t.Errorf("after %s node %s is known: %t, want %t", time.Since(v.start), id, got, wanted)
				}
			}
		}
		know("a", "b", "gone")
		time.Sleep(48*time.Hour + time.Minute)
		v.apply(node("c", active, 6))
		know("a", "b", "c")
		time.Sleep(time.Hour)
		v.apply(node("c", active, 7))
		know("a", "c")
		if len(v.retired) != 0 {
			t.Errorf("%d retired nodes are still noted", len(v.retired))
		}
	})
}

// scripted is a stream of frames that the test gives. A ping is answered at once.
type scripted struct {
	frames chan *recoveryv1.WatchAuthorityResponse
	done   chan struct{}
}

func (s *scripted) Send(req *recoveryv1.WatchAuthorityRequest) error {
	if ping := req.GetPing(); ping != nil {
		s.frames <- &recoveryv1.WatchAuthorityResponse{Frame: &recoveryv1.WatchAuthorityResponse_Pong{
			Pong: &recoveryv1.AuthorityPong{PingId: ping.GetPingId()},
		}}
	}
	return nil
}

func (s *scripted) Receive() (*recoveryv1.WatchAuthorityResponse, error) {
	select {
	case f := <-s.frames:
		return f, nil
	case <-s.done:
		return nil, io.EOF
	}
}

func (s *scripted) CloseRequest() error  { return nil }
func (s *scripted) CloseResponse() error { return nil }

// A recovery of an earlier build sends neither profiles nor which profile a node has: the profiles that another replica
// has sent are not offered any more. The profiles of a recovery of this build replace those of the replica before.
func TestProfilesOfAnotherReplicaEndWithItsStream(t *testing.T) {
	for name, sent := range map[string]*recoveryv1.AuthorityProfiles{
		"of an earlier build": nil,
		"of this build":       {Profiles: []*recoveryv1.AuthorityProfile{{Active: true}}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := &scripted{frames: make(chan *recoveryv1.WatchAuthorityResponse, 64), done: make(chan struct{})}
				v := New(slog.New(slog.DiscardHandler), Config{}, func(context.Context) (Stream, error) { return s, nil },
					func(*recoveryv1.NodeAuthority) {})
				var got []*recoveryv1.AuthorityProfiles
				v.OnProfiles(func(p *recoveryv1.AuthorityProfiles) { got = append(got, p) })
				s.frames <- &recoveryv1.WatchAuthorityResponse{Frame: &recoveryv1.WatchAuthorityResponse_SnapshotEnd{
					SnapshotEnd: &recoveryv1.AuthoritySnapshotEnd{},
				}}
				if sent != nil {
					s.frames <- &recoveryv1.WatchAuthorityResponse{Frame: &recoveryv1.WatchAuthorityResponse_Profiles{
						Profiles: sent,
					}}
				}
				ended := make(chan struct{})
				go func() { defer close(ended); _ = v.runOnce(t.Context()) }()
				time.Sleep(3 * time.Second)
				close(s.done)
				<-ended
				if len(got) != 1 || len(got[0].GetProfiles()) != len(sent.GetProfiles()) {
					t.Errorf("profiles %v, want %v", got, sent)
				}
			})
		})
	}
}
