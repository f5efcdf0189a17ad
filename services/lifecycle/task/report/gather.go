package report

import (
	"fmt"
	"slices"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/envelope"
)

// taskUpdate is what one node reports of one attempt of one task in a batch, folded to the furthest state.
type taskUpdate struct {
	ref       *nodev1.TaskRef
	node      string
	epoch     int64 // of the session by which the result came, or else the first report
	delivered bool
	started   bool
	result    *nodev1.TaskResult
	note      string
	session   string
	signed    []*nodev1.SignedTask // envelopes that came with the report of this attempt
}

// state returns the state to which this update alone moves the task.
func (w taskUpdate) state() commonv1.TaskState {
	switch {
	case w.result != nil:
		return resultState(w.result.GetState())
	case w.started:
		return commonv1.TaskState_TASK_STATE_RUNNING
	case w.delivered:
		return commonv1.TaskState_TASK_STATE_DELIVERED
	default:
		return commonv1.TaskState_TASK_STATE_UNSPECIFIED // progress alone
	}
}

// resultState maps the state in an agent's result to a terminal state. Any state that an agent may not report as an
// end, such as `expired`, becomes failed.
func resultState(s commonv1.TaskState) commonv1.TaskState {
	switch s {
	case commonv1.TaskState_TASK_STATE_SUCCEEDED, commonv1.TaskState_TASK_STATE_CANCELLED,
		commonv1.TaskState_TASK_STATE_SUPERSEDED, commonv1.TaskState_TASK_STATE_OUTCOME_UNKNOWN:
		return s
	default:
		return commonv1.TaskState_TASK_STATE_FAILED
	}
}

func key(ref *nodev1.TaskRef) string {
	return fmt.Sprintf("%s/%d", ref.GetTaskId(), ref.GetAttempt())
}

// updateKey returns the key of one node's update of an attempt. Two nodes may report the same attempt if the disk of
// one is a copy of the other's: their updates are kept apart, and only those of the task's own node count.
func updateKey(nodeID string, ref *nodev1.TaskRef) string { return key(ref) + "/" + nodeID }

// gather folds a batch into one update of each node for each attempt, and returns the keys in a sorted order so that
// every transaction locks rows in the same order. Of results that contradict each other the first is applied; the
// others are returned apart, as evidence.
func gather(req *lifecyclev1.ReportTasksRequest) (map[string]taskUpdate, []string, []taskUpdate) {
	words := map[string]taskUpdate{}
	var order []string
	var contradictions []taskUpdate
	at := func(r *lifecyclev1.NodeReport, ref *nodev1.TaskRef, put func(*taskUpdate)) {
		k := updateKey(r.GetNodeId(), ref)
		w, ok := words[k]
		if !ok {
			w = taskUpdate{ref: ref, node: r.GetNodeId(), epoch: r.GetGeneration(), session: r.GetSessionId()}
			order = append(order, k)
		}
		put(&w)
		words[k] = w
	}
	for _, r := range req.GetReports() {
		for _, ref := range r.GetDelivered() {
			at(r, ref, func(w *taskUpdate) { w.delivered = true })
		}
		for _, f := range r.GetStarted() {
			at(r, f.GetTask(), func(w *taskUpdate) { w.started = true })
		}
		for _, f := range r.GetProgress() {
			at(r, f.GetTask(), func(w *taskUpdate) { w.note = f.GetNote() })
		}
		for _, f := range r.GetResults() {
			at(r, f.GetTask(), func(w *taskUpdate) {
				if f.GetSigned() != nil {
					w.signed = append(w.signed, f.GetSigned())
				}
				switch {
				case w.result == nil:
					w.result, w.epoch, w.session = f, r.GetGeneration(), r.GetSessionId()
				case resultState(w.result.GetState()) != resultState(f.GetState()):
					contradictions = append(contradictions,
						taskUpdate{ref: f.GetTask(), node: w.node, epoch: r.GetGeneration(), session: r.GetSessionId(), result: f})
				}
			})
		}
		for _, signed := range r.GetSigned() {
			taskID, attempt, ok := envelope.Claimed(signed.GetEnvelope())
			if !ok {
				continue
			}
			k := updateKey(r.GetNodeId(), &nodev1.TaskRef{TaskId: taskID, Attempt: attempt})
			if w, reported := words[k]; reported {
				w.signed = append(w.signed, signed)
				words[k] = w
			}
		}
	}
	slices.Sort(order)
	return words, order, contradictions
}
