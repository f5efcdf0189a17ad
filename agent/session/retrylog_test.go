package session_test

import (
	"context"
	"errors"
	"log/slog"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpuaas/mesh/agent/agenttest"
	"github.com/gpuaas/mesh/agent/diag"
	"github.com/gpuaas/mesh/agent/session"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

// TestTheLogOfARetryHasItsRecord checks the lines of an open that failed, and of a renewal that was refused.
func TestTheLogOfARetryHasItsRecord(t *testing.T) {
	denial := fault.ToDenial(fault.New(commonv1.Reason_REASON_CERTIFICATE_AUTHORITY_UNAVAILABLE, ""), "")
	for message, broken := range map[string]func(p *fakeServer){
		"session not open": func(p *fakeServer) { p.refuse = errors.New("no handshake") },
		"renewal refused":  func(p *fakeServer) { p.denyRenewal = denial },
	} {
		t.Run(message, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newFakeServer(t)
				p.interval = time.Minute
				broken(p)
				records, err := diag.Open(diag.Config{Path: filepath.Join(t.TempDir(), "diagnostics.json"), Now: time.Now})
				if err != nil {
					t.Fatal(err)
				}
				lines := agenttest.NewCatcher(message)
				h := start(t, p, p.memory(), func(deps *session.Deps, _ *session.Config) {
					deps.Logger = slog.New(lines)
					deps.Record = func(_ context.Context, d session.Diagnostic) (diag.Entry, error) {
						return records.Record(d.Code, d.Detail, d.NextRetry)
					}
				})
				select {
				case line := <-lines.Found:
					agenttest.CheckRetryLine(t, line)
				case <-time.After(10 * time.Hour):
					t.Error("no such line")
				}
				h.stop()
			})
		})
	}
}
