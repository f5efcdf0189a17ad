package session

import (
	"context"
	"errors"
	"log/slog"

	"github.com/gpuaas/mesh/agent/diag"
	"github.com/gpuaas/mesh/agent/identity"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/pki"
)

// takeRoots gives a list of the roots of services to the hook, which stores what follows from it. A list that is
// refused or cannot be stored is recorded as a diagnostic. One that names no root that is trusted is logged: the agent
// may have its bundle from issuers that the set of the control plane does not have. In each case the previous roots
// stay trusted. A control plane of an earlier build sends none.
func (c *Client) takeRoots(ctx context.Context, list *nodev1.ServiceRoots) {
	hook := c.deps.Hooks.ServiceRoots
	if list == nil || hook == nil {
		return
	}
	links := make([]pki.RootLink, len(list.GetRoots()))
	for i, root := range list.GetRoots() {
		links[i] = pki.RootLink{DER: root.GetCertificate(), Cross: root.GetCrossCertificate(), Retired: root.GetRetired()}
	}
	err := hook(ctx, links)
	if err == nil {
		return
	}
	if errors.Is(err, identity.ErrRootsUnrelated) {
		c.deps.Logger.LogAttrs(ctx, slog.LevelWarn, "roots of services not followed", slog.Any("error", err))
		return
	}
	code, what := commonv1.DiagnosticCode_DIAGNOSTIC_CODE_STATE_DIRECTORY_FAILED, "not stored"
	if _, refused := errors.AsType[*identity.RootsRefusedError](err); refused {
		code, what = commonv1.DiagnosticCode_DIAGNOSTIC_CODE_SERVER_TLS_UNTRUSTED, "refused"
	}
	detail := "the list of the roots of services was " + what + ", those from before are trusted: " + err.Error()
	c.deps.Logger.LogAttrs(ctx, slog.LevelError, "roots of services not taken", slog.String("detail", detail))
	c.record(ctx, Diagnostic{Code: code, Detail: detail})
}

// record keeps a diagnostic and returns what is kept.
func (c *Client) record(ctx context.Context, d Diagnostic) diag.Entry {
	if c.deps.Record == nil {
		return diag.Entry{}
	}
	kept, err := c.deps.Record(ctx, d)
	if err != nil {
		c.deps.Logger.LogAttrs(ctx, slog.LevelError, "diagnostic not recorded", slog.Any("error", err))
	}
	return kept
}
