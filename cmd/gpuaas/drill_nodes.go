package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/nodes"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/output"
	drillkit "github.com/gpuaas/mesh/drill/kit"
)

// writeNodes writes what `gpuaas nodes get` showed of the nodes of a drill, into a file of the drill's name. Those
// of a control are left out.
func writeNodes(dir string, r drillkit.Result) error {
	if dir == "" || r.Control != "" || len(r.Nodes) == 0 {
		return nil
	}
	var text bytes.Buffer
	printer := &output.Printer{Out: &text, Err: &text, TTY: true, Width: 120, Now: time.Now}
	for _, n := range r.Nodes {
		fmt.Fprintf(&text, "$ gpuaas nodes get %s\n", n.GetName())
		if err := output.One(printer, nodes.View, n); err != nil {
			return err
		}
	}
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return fmt.Errorf("keep the nodes of drill %s: %w", r.Name, err)
	}
	path := filepath.Join(dir, fmt.Sprintf("%02d-%s.txt", r.Row, r.Name))
	if err := os.WriteFile(path, text.Bytes(), 0o600); err != nil {
		return fmt.Errorf("keep the nodes of drill %s: %w", r.Name, err)
	}
	return nil
}
