package launchlog

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/placement"
)

const (
	ahead  = recoveryv1.RollbackEvidenceKind_ROLLBACK_EVIDENCE_KIND_LAUNCH_LOG_AHEAD
	behind = recoveryv1.RollbackEvidenceKind_ROLLBACK_EVIDENCE_KIND_LAUNCH_LOG_BEHIND
)

// Fact is one difference which shows that the log and the database are of different times.
type Fact struct {
	Kind    recoveryv1.RollbackEvidenceKind
	Subject string // the workspace, or the placement for what concerns the log as a whole
	Detail  string
	// Remembered is the highest epoch that the log has of the subject, Known the highest that the database has; zero:
	// none. The number of the older side is not below the first of the present era, unless a restore was declared since
	// the last comparison: what differs then is new, whenever it was launched.
	Remembered, Known int64
}

// rowState is the state of one (workspace, epoch) of the log in the database.
type rowState struct {
	known    bool  // the workspace has a row
	epoch    int64 // the last one that was drawn for it
	instance string
	state    string // of the instance's row; empty: there is none
}

// liveRow is an instance that is live according to its row.
type liveRow struct {
	WorkspaceID string    `db:"workspace_id" expr:"@.workspace_id::text"`
	InstanceID  string    `db:"instance_id" expr:"@.instance_id::text"`
	Epoch       int64     `db:"epoch"`
	StartedAt   time.Time `db:"started_at" expr:"coalesce(@.started_at, 'epoch'::timestamptz)"`
}

// position is the row of a placement's log as of the last comparison.
type position struct {
	there       bool
	logID       string
	seq         int64
	era         int64
	present     int64 // the era of the database when the position was read
	reported    bool
	acceptedSeq int64
	acceptedAt  *time.Time
}

// covers reports whether the comparison of a log that was read in an era has nothing to record.
func (at position) covers(log placement.LaunchLog, era int64) bool {
	return at.there && at.logID == log.ID && at.seq >= log.Seq && at.era >= era
}

// since returns at with the line that a log which was read after seen must have reached: the lower of the two lines,
// and zero if seen is of another log, which an acceptance in between replaced.
func (at position) since(seen position) position {
	at.there = at.there && seen.there
	at.seq = min(at.seq, seen.seq)
	if seen.logID != at.logID {
		at.seq = 0
	}
	return at
}

// Ahead compares one entry of the log with the database, which was read after the log. It returns a text that describes
// the contradiction, empty if they agree.
func Ahead(e placement.LogEntry, r rowState) string {
	ended := e.Ended > 0
	switch {
	case !r.known && !ended:
		return "an instance was launched for a workspace that the database does not know"
	case !r.known:
		return "" // a workspace without a row may have been deleted by retention
	case e.Epoch > r.epoch:
		return fmt.Sprintf("epoch %d was launched or ended, and the last one that the database has drawn is %d", e.Epoch,
			r.epoch)
	case e.InstanceID != "" && r.instance != "" && e.InstanceID != r.instance:
		return fmt.Sprintf("epoch %d was launched as instance %s, and the database has instance %s", e.Epoch, e.InstanceID,
			r.instance)
	case !ended && r.state == "" && e.Epoch == r.epoch && e.InstanceID != "":
		return fmt.Sprintf("epoch %d runs as instance %s, which the database does not know", e.Epoch, e.InstanceID)
	case ended && !e.Fenced && (r.state == "live" || r.state == "launching"):
		return fmt.Sprintf("epoch %d has ended, and its instance is %s in the database, which marks an end before it "+
			"asks for it", e.Epoch, r.state)
	default:
		return ""
	}
}

// writtenSince returns the entries with a line after a position: of their launch or of their end.
func writtenSince(entries []placement.LogEntry, seq int64) []placement.LogEntry {
	var out []placement.LogEntry
	for _, e := range entries {
		if max(e.First, e.Ended) > seq {
			out = append(out, e)
		}
	}
	return out
}

// aheadFacts returns the differences in which entries of the log are ahead of the database, for each workspace the one
// with the highest epoch.
func aheadFacts(entries []placement.LogEntry, rows []rowState, acceptedSeq, floor int64) []Fact {
	byWorkspace := map[string]*Fact{}
	for i, e := range entries {
		since := e.First
		if e.Ended > 0 && rows[i].known && e.Epoch <= rows[i].epoch && e.InstanceID == rows[i].instance {
			since = e.Ended // its end is what differs
		}
		if since <= acceptedSeq || !ids.Valid(e.WorkspaceID) {
			continue
		}
		why := Ahead(e, rows[i])
		if why == "" {
			continue
		}
		if have := byWorkspace[e.WorkspaceID]; have == nil || have.Remembered < e.Epoch {
			byWorkspace[e.WorkspaceID] = &Fact{
				Kind: ahead, Subject: e.WorkspaceID, Detail: why, Remembered: e.Epoch,
				Known: rows[i].epoch,
			}
		}
	}
	out := make([]Fact, 0, len(byWorkspace))
	for _, f := range byWorkspace {
		f.Remembered = max(f.Remembered, floor)
		out = append(out, *f)
	}
	slices.SortFunc(out, func(a, b Fact) int { return strings.Compare(a.Subject, b.Subject) })
	return out
}

// behindFacts returns the differences in which the log lacks what the database has confirmed. live was read before the
// log, and at is as of then.
func behindFacts(kind commonv1.PlacementDriver, log placement.LaunchLog, at position, live []liveRow,
	floor int64,
) []Fact {
	var out []Fact
	whole := Fact{Kind: behind, Subject: names.Of(kind), Known: floor}
	switch {
	case !at.there:
	case at.logID != log.ID:
		whole.Detail = fmt.Sprintf("the launch log is %s, and the database has compared itself with log %s before", log.ID,
			at.logID)
		out = append(out, whole)
	case at.seq > log.Seq:
		whole.Detail = fmt.Sprintf("the launch log ends at line %d, and the database has seen line %d of it", log.Seq, at.seq)
		out = append(out, whole)
	}
	logged := map[string]int64{}
	has := map[string]bool{}
	for _, e := range log.Entries {
		logged[e.WorkspaceID] = max(logged[e.WorkspaceID], e.Epoch)
		has[fmt.Sprintf("%s:%d", e.WorkspaceID, e.Epoch)] = true
	}
	for _, r := range live {
		if has[fmt.Sprintf("%s:%d", r.WorkspaceID, r.Epoch)] || at.acceptedAt != nil && !r.StartedAt.After(*at.acceptedAt) {
			continue
		}
		out = append(out, Fact{
			Kind: behind, Subject: r.WorkspaceID, Remembered: logged[r.WorkspaceID], Known: max(r.Epoch, floor),
			Detail: fmt.Sprintf("epoch %d is live as instance %s in the database, and the launch log has never launched it",
				r.Epoch, r.InstanceID),
		})
	}
	return out
}

// over returns the workspaces of a log that the database does not know, and all of whose instances have ended. Their
// rows were committed before the first launch, so that the database has deleted them since: they are never launched
// again.
func over(entries []placement.LogEntry, rows []rowState) []string {
	stays := map[string]bool{}
	for i, e := range entries {
		stays[e.WorkspaceID] = stays[e.WorkspaceID] || rows[i].known || e.Ended == 0 || !ids.Valid(e.WorkspaceID)
	}
	maps.DeleteFunc(stays, func(_ string, stay bool) bool { return stay })
	return slices.Sorted(maps.Keys(stays))
}

// floorOf returns the first number of the present era if no restore was declared or accepted since the last comparison,
// else zero.
func floorOf(at position, era int64) int64 {
	if !at.there || at.era != era {
		return 0
	}
	return era << 40 // the arithmetic of mesh.next
}

// liveRows reads the instances of a placement that are live according to their rows.
func liveRows(ctx context.Context, q pg.Querier, kind commonv1.PlacementDriver) ([]liveRow, error) {
	out, err := pg.All[liveRow](ctx, q, liveInstances, names.Of(kind))
	if err != nil {
		return nil, fmt.Errorf("read live instances: %w", err)
	}
	return out, nil
}

// rowStates reads the state in the database of each entry of a log, in the order of the entries.
func rowStates(ctx context.Context, q pg.Querier, entries []placement.LogEntry) ([]rowState, error) {
	out := make([]rowState, len(entries))
	var workspaces []string
	var epochs []int64
	var at []int
	for i, e := range entries {
		if !ids.Valid(e.WorkspaceID) {
			continue // no mesh has such an id
		}
		workspaces, epochs, at = append(workspaces, e.WorkspaceID), append(epochs, e.Epoch), append(at, i)
	}
	if len(workspaces) == 0 {
		return out, nil
	}
	found, err := pg.All[launchRow](ctx, q, launchStates, workspaces, epochs)
	if err != nil {
		return nil, fmt.Errorf("read rows of launches: %w", err)
	}
	for _, r := range found {
		out[at[r.Place-1]] = rowState{known: true, epoch: r.Epoch, instance: r.Instance, state: r.State}
	}
	return out, nil
}
