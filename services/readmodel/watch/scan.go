package watch

import (
	"context"
	"maps"
	"slices"
	"strings"

	"github.com/google/uuid"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/services/readmodel/list"
	"github.com/gpuaas/mesh/services/readmodel/project"
	"github.com/gpuaas/mesh/services/readmodel/view"
)

// noteNodes notes the nodes that an event changes, for the next scan. The verdict about the control plane is shown on
// all nodes that are not connected.
func (h *Hub) noteNodes(r events.Record) {
	if r.Kind == project.KindVerdict && read(r, &recoveryv1.NodeVerdict{}).GetNodeId() == "" {
		h.whole = true
	}
	for _, k := range changedBy(r) {
		if _, err := uuid.Parse(k.id); err != nil || k.topic != readmodelv1.Topic_TOPIC_NODES {
			continue
		}
		if h.events == nil {
			h.events = map[string]struct{}{}
		}
		h.events[k.id] = struct{}{}
	}
}

// scan marks the nodes whose state changed without an event of their own: their replica stopped beating, or recovery
// has judged the control plane. While neither happens, these can only be nodes whose events have come since the last
// scan.
func (h *Hub) scan(ctx context.Context) error {
	beats, err := h.readBeats(ctx)
	if err != nil {
		return err
	}
	var now map[string]string
	whole := h.nodes == nil || beats != h.beats || h.whole
	if whole {
		now, err = h.disconnected(ctx, nil)
	} else {
		now, err = h.scanAgain(ctx)
	}
	if err != nil {
		return err
	}
	if whole {
		h.beats, h.whole = beats, false
	}
	h.events = nil
	h.touch(now)
	h.nodes = now
	return nil
}

// readBeats returns the ids of the replicas that beat, as one text.
func (h *Hub) readBeats(ctx context.Context) (string, error) {
	var fresh []string
	err := h.deps.Reader.Read(ctx, list.All(), func(ctx context.Context, s *view.Snapshot) error {
		replicas, err := s.Replicas(ctx)
		fresh = nil
		for _, r := range replicas {
			if r.Fresh {
				fresh = append(fresh, r.ID)
			}
		}
		return err
	})
	return strings.Join(fresh, " "), err
}

// scanAgain returns the nodes that are not connected. It takes them from the last scan, and reads only those that may
// have changed since.
func (h *Hub) scanAgain(ctx context.Context) (map[string]string, error) {
	now := maps.Clone(h.nodes)
	for part := range slices.Chunk(slices.Sorted(maps.Keys(h.events)), chunk) {
		found, err := h.disconnected(ctx, part)
		if err != nil {
			return nil, err
		}
		for _, id := range part {
			delete(now, id)
		}
		maps.Copy(now, found)
	}
	return now, nil
}

// disconnected returns the reasons of the nodes that are not connected, by node id: those among ids, or all if ids is
// nil.
func (h *Hub) disconnected(ctx context.Context, ids []string) (map[string]string, error) {
	out := map[string]string{}
	for page := (list.Page{Size: 1000}); ; {
		var more string
		err := h.deps.Reader.Read(ctx, list.All(), func(ctx context.Context, s *view.Snapshot) error {
			nodes, next, err := s.Nodes(ctx, view.NodeFilter{Disconnected: true, IDs: ids}, page)
			for _, n := range nodes {
				out[n.GetNodeId()] = n.GetReason()
			}
			more = next
			return err
		})
		if err != nil || more == "" {
			return out, err
		}
		page.Token = more
	}
}

// touch marks the nodes whose reason has changed since the last scan.
func (h *Hub) touch(now map[string]string) {
	if h.nodes == nil {
		return
	}
	changed := func(id string) {
		k := key{readmodelv1.Topic_TOPIC_NODES, id}
		if _, ok := h.dirty[k]; !ok {
			h.dirty[k] = mark{pos: noPosition}
		}
	}
	for id, reason := range now {
		if old, ok := h.nodes[id]; !ok || old != reason {
			changed(id)
		}
	}
	for id := range h.nodes {
		if _, ok := now[id]; !ok {
			changed(id)
		}
	}
}
