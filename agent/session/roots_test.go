package session_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpuaas/mesh/agent/identity"
	"github.com/gpuaas/mesh/agent/session"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/pki"
)

// TestRootsThatAreNotTakenAreRecordedByTheirCause: a refused list is recorded as a TLS failure, one that cannot be
// stored under another code, and one of other issuers is not recorded.
func TestRootsThatAreNotTakenAreRecordedByTheirCause(t *testing.T) {
	const untrusted = commonv1.DiagnosticCode_DIAGNOSTIC_CODE_SERVER_TLS_UNTRUSTED
	for name, test := range map[string]struct {
		err  error
		code commonv1.DiagnosticCode // unspecified: none is recorded
		want string
	}{
		"taken": {},
		"refused": {
			fmt.Errorf("ca-bundle.crt: %w", &identity.RootsRefusedError{Reason: "a list of 0 roots"}), untrusted, "was refused",
		},
		"of other issuers": {err: fmt.Errorf("ca-bundle.crt: %w", identity.ErrRootsUnrelated)},
		"not stored": {
			fmt.Errorf("store trust bundle: %w",
				&fs.PathError{Op: "open", Path: "journal.json", Err: errors.New("no space left on device")}),
			commonv1.DiagnosticCode_DIAGNOSTIC_CODE_STATE_DIRECTORY_FAILED, "was not stored",
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newFakeServer(t)
				list := &nodev1.ServiceRoots{Roots: []*nodev1.ServiceRoot{{Certificate: []byte("a root")}}}
				p.script = func(v *visit) error {
					generation, err := v.issue()
					if err != nil {
						return err
					}
					frame := &nodev1.ConnectResponse{Frame: &nodev1.ConnectResponse_ServiceRoots{ServiceRoots: list}}
					if err := errors.Join(v.welcome(generation), v.ready(generation), v.admit(generation), v.send(frame)); err != nil {
						return err
					}
					return v.run()
				}
				var took atomic.Bool
				h := start(t, p, p.memory(), func(d *session.Deps, _ *session.Config) {
					d.Hooks.ServiceRoots = func(context.Context, []pki.RootLink) error { took.Store(true); return test.err }
				})
				h.until("the list is with the hook", time.Minute, took.Load)
				h.stop()
				var codes []commonv1.DiagnosticCode
				for _, d := range h.diagnostics {
					codes = append(codes, d.Code)
					if !strings.Contains(d.Detail, test.want) {
						t.Errorf("recorded as %q, want %q", d.Detail, test.want)
					}
				}
				var want []commonv1.DiagnosticCode
				if test.code != 0 {
					want = []commonv1.DiagnosticCode{test.code}
				}
				if !slices.Equal(codes, want) {
					t.Errorf("recorded with the codes %v, want %v", codes, want)
				}
			})
		})
	}
}
