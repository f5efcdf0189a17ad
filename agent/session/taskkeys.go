package session

import (
	"context"
	"log/slog"
	"strings"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/pki"
)

// takeKeys stores the task keys that follow from a list, puts them in force and returns the ids of the resulting keys.
// A list that does not follow from any present key, or that cannot be stored, is recorded as a diagnostic, and the
// previous keys stay in force.
func (c *Client) takeKeys(ctx context.Context, list []*nodev1.TaskKey) []string {
	id := c.deps.Identity
	if len(list) == 0 { // an earlier control plane sends none
		held, err := id.TaskKeys()
		if err != nil || held == nil {
			return nil
		}
		return held.IDs()
	}
	links := make([]pki.Link, len(list))
	for i, key := range list {
		links[i] = pki.Link{
			KeyID: key.GetKeyId(), Public: key.GetPublicKey(), EndorsedBy: key.GetEndorsedBy(),
			Endorsement: key.GetEndorsement(), Retired: key.GetRetired(),
		}
	}
	held, unbelieved, err := id.TakeTaskKeys(links)
	detail := ""
	switch {
	case err != nil:
		detail = "the list of the keys of tasks was refused, the keys held go on: " + err.Error()
	case len(unbelieved) > 0:
		detail = "no key held endorses these keys of tasks, they are not believed: " + strings.Join(unbelieved, ", ")
	}
	if detail != "" {
		c.deps.Logger.LogAttrs(ctx, slog.LevelError, "keys of tasks refused", slog.String("detail", detail))
		c.record(ctx, Diagnostic{Code: commonv1.DiagnosticCode_DIAGNOSTIC_CODE_TASK_KEYS_REFUSED, Detail: detail})
	}
	if held == nil {
		return nil
	}
	if hook := c.deps.Hooks.TaskKeys; hook != nil {
		hook(held)
	}
	return held.IDs()
}

// onTaskKeys takes a list within a session and replies with the ids of the resulting keys.
func (k *conn) onTaskKeys(ctx context.Context, list *nodev1.TaskKeys) error {
	held := k.client.takeKeys(ctx, list.GetKeys())
	if len(held) == 0 {
		return nil
	}
	frame := &nodev1.ConnectRequest{
		Frame: &nodev1.ConnectRequest_TaskKeysHeld{TaskKeysHeld: &nodev1.TaskKeysHeld{KeyIds: held}},
	}
	return k.send(frame, nil)
}
