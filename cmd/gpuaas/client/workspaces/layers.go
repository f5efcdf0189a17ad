package workspaces

import (
	"strings"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/human"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/operations"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/output"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
)

// layerColumn returns the line of one layer: its state, since when, what it means for the user, which operations wait,
// and what was observed. It is empty for a workspace without that layer.
func layerColumn(
	title string, of func(*readmodelv1.Workspace) *readmodelv1.Layer,
) output.Column[*readmodelv1.Workspace] {
	return output.Column[*readmodelv1.Workspace]{Title: title, Of: func(
		pr *output.Printer, w *readmodelv1.Workspace,
	) string {
		layer := of(w)
		if layer == nil {
			return ""
		}
		text := human.Enum(layer.GetState())
		if layer.GetSince() != nil {
			text += " since " + pr.When(layer.GetSince())
		}
		text += ": " + layer.GetUserText()
		if len(layer.GetWaiting()) > 0 {
			text += " Waiting: " + strings.Join(kit.TextsOf(layer.GetWaiting(), operations.Verb), ", ") + "."
		}
		if layer.GetDetail() != "" {
			text += " (" + layer.GetDetail() + ")"
		}
		return text
	}}
}
