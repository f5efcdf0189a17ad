package session

import (
	"context"
	"log/slog"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/pki"
)

// takeRoots gives a list of the roots of services to the hook, which stores what follows from it. A list that is refused is recorded as a diagnostic, and the
// roots from before are trusted. A control plane of an earlier build sends none.
func (c *Client) takeRoots(ctx context.Context, list *nodev1.ServiceRoots) {
	hook := c.deps.Hooks.ServiceRoots
	if list == nil || hook == nil {
		return
	}
	links := make([]pki.RootLink, len(list.GetRoots()))
	for i, root := range list.GetRoots() {
		links[i] = pki.RootLink{DER: root.GetCertificate(), Cross: root.GetCrossCertificate(), Retired: root.GetRetired()}
	}
	if err := hook(ctx, links); err != nil {
		detail := "the list of the roots of services was refused, those from before are trusted: " + err.Error()
		c.deps.Logger.LogAttrs(ctx, slog.LevelError, "roots of services refused", slog.String("detail", detail))
		c.record(ctx, Diagnostic{Code: commonv1.DiagnosticCode_DIAGNOSTIC_CODE_SERVER_TLS_UNTRUSTED, Detail: detail})
	}
}

func (c *Client) record(ctx context.Context, d Diagnostic) {
	if c.deps.Record == nil {
		return
	}
	if err := c.deps.Record(ctx, d); err != nil {
		c.deps.Logger.LogAttrs(ctx, slog.LevelError, "diagnostic not recorded", slog.Any("error", err))
	}
}
