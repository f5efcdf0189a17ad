package sagatest_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/claims"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/saga/sagatest"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// shelf is a resource with a list of its own. It refuses nothing: a thing that is put twice is in the list twice.
type shelf struct {
	mu    sync.Mutex
	items []string
}

func (s *shelf) put(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.items = append(s.items, name)
}

func (s *shelf) has(name string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Contains(s.items, name)
}

func (s *shelf) remove(match func(string) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	kept := s.items[:0]
	for _, b := range s.items {
		if !match(b) {
			kept = append(kept, b)
		}
	}
	s.items = kept
}

func (s *shelf) List(context.Context) ([]string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]string(nil), s.items...), nil
}

// shelfStep returns a step that puts an item on the shelf: intent, check, put, confirm with the step's end.
func shelfStep(s *shelf, kind string) saga.Step {
	name := func(env *saga.Env) string { return fmt.Sprintf("%s/%s/%d", env.WorkspaceID, kind, env.Epoch) }
	return saga.Step{
		Name: "put " + kind, Class: saga.Create, Kinds: []string{kind},
		Do: func(ctx context.Context, env *saga.Env) (saga.Outcome, error) {
			claim, _, err := env.Intent(ctx, claims.Spec{Kind: kind, Name: name(env)})
			if err != nil {
				return saga.Outcome{}, err
			}
			if !s.has(claim.Name) {
				s.put(claim.Name)
			}
			return saga.Done(map[string]string{"item": claim.Name}, func(ctx context.Context, tx pgx.Tx) error {
				return env.ConfirmTx(ctx, tx, claim, claim.Name)
			}), nil
		},
		Undo: func(ctx context.Context, env *saga.Env) (saga.Outcome, error) {
			claims, err := env.Claims(ctx, kind)
			if err != nil {
				return saga.Outcome{}, err
			}
			for _, c := range claims {
				s.remove(func(b string) bool { return b == c.Name })
			}
			return saga.Done(nil, func(ctx context.Context, tx pgx.Tx) error {
				for _, c := range claims {
					if err := env.ReleaseTx(ctx, tx, c); err != nil {
						return err
					}
				}
				return nil
			}), nil
		},
		Observe: func(ctx context.Context, env *saga.Env) (saga.Observation, error) {
			if s.has(name(env)) {
				// The claim may not be confirmed yet. Partial lets Do run, which checks before it puts and then confirms.
				return saga.Observation{Presence: saga.Partial}, nil
			}
			return saga.Observation{Presence: saga.Absent}, nil
		},
	}
}

func toy(s *shelf) saga.Definition {
	wait := saga.Step{Name: "wait", Class: saga.Pure, Do: func(_ context.Context, env *saga.Env) (saga.Outcome, error) {
		var out struct{ Item string }
		if ok, err := env.Output("put disk", &out); err != nil || !ok || !s.has(out.Item) {
			return saga.Outcome{}, saga.Fail(commonv1.OwnerLayer_OWNER_LAYER_RUNTIME, commonv1.Reason_REASON_INTERNAL,
				"the disk is not there", err)
		}
		if time.Since(first(env)) < 20*time.Millisecond {
			return saga.Wait(saga.WaitFor{For: 15 * time.Millisecond, Why: "the paint dries", WakeOnSignal: true}), nil
		}
		return saga.Done(nil), nil
	}}
	return saga.Definition{
		Name: "toy", Version: 1, Steps: []saga.Step{shelfStep(s, "disk"), wait, shelfStep(s, "lamp")},
		States: saga.WorkspaceStates{
			Running:   commonv1.WorkspaceState_WORKSPACE_STATE_PROVISIONING,
			Succeeded: commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE,
			Failed:    commonv1.WorkspaceState_WORKSPACE_STATE_FAILED,
		},
	}
}

var began sync.Map

// first returns when this run's wait was first seen.
func first(env *saga.Env) time.Time {
	at, _ := began.LoadOrStore(env.RunID, time.Now())
	return at.(time.Time)
}

func TestToyConforms(t *testing.T) {
	testkit.IO(t)
	s := &shelf{}
	sagatest.Conform(t, sagatest.Case{
		DB: testkit.DB(t), Definition: toy(s), Resource: s,
		Clean: func(_ context.Context, workspaceID string) error {
			s.remove(func(b string) bool { return strings.HasPrefix(b, workspaceID) })
			return nil
		},
	})
}
