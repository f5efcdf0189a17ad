package audit

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/rpc"
)

// Kind is the kind of the events that carry entries.
const Kind = "audit.recorded"

// aggregate is the type of the aggregate: an entry is its own, and never changes.
const aggregate = "audit"

// How a decision ended.
const (
	Done    = "done"
	Refused = "refused"
	Failed  = "failed"
)

// maxReason is how much of a reason is kept, in bytes.
const maxReason = 1024

// Entry is one decision. An empty id means unknown. An empty correlation is taken from the context, an empty actor is
// the caller, and an empty outcome means Done.
type Entry struct {
	// Action names the decision, in dotted words, the noun first: `workspace.cancel`.
	Action string
	// Actor is a person's subject or `service/<name>`; empty: the person who makes the request or for whom it is made, and
	// in a loop the service itself.
	Actor   string
	Outcome string
	// Code is the reason of a refusal; Reason is in words, as given.
	Code   commonv1.Reason
	Reason string
	// SubjectType and SubjectID name the object of the decision.
	SubjectType, SubjectID string

	TenantID, WorkspaceID, WorkflowID, AllocationID, NodeID, CorrelationID string

	// Details holds whatever else matters: texts, numbers, flags, times, lists and maps of them, and proto messages.
	// Secrets in it are hidden, see Clean.
	Details map[string]any
}

// Refusal returns the entry of a request that was refused with err, and false if err is no decision: requests that fail
// because something is broken, unknown or overloaded are not audited.
func (e Entry) Refusal(err error) (Entry, bool) {
	f, ok := fault.As(err)
	if !ok || !decides(f.Reason) {
		return e, false
	}
	e.Outcome, e.Code, e.Reason = Refused, f.Reason, f.Public
	if len(f.Unmet) > 0 || f.ConflictingID != "" {
		details := make(map[string]any, len(e.Details)+2)
		maps.Copy(details, e.Details)
		if len(f.Unmet) > 0 {
			details["unmet"] = f.Unmet
		}
		if f.ConflictingID != "" {
			details["conflicting_id"] = f.ConflictingID
		}
		e.Details = details
	}
	return e, true
}

// decides reports whether a reason is a decision to refuse, and not a failure or a mistake in the request.
func decides(r commonv1.Reason) bool {
	switch r { // everything else is a decision
	case commonv1.Reason_REASON_UNSPECIFIED, commonv1.Reason_REASON_INTERNAL, commonv1.Reason_REASON_UNAVAILABLE,
		commonv1.Reason_REASON_DEADLINE_EXCEEDED, commonv1.Reason_REASON_INVALID_ARGUMENT, commonv1.Reason_REASON_NOT_FOUND,
		commonv1.Reason_REASON_OVERLOADED,
		commonv1.Reason_REASON_CONFLICT:
		return false
	default:
		return true
	}
}

// Record appends entries in the transaction of the decision that they record, and returns the id of the last one, which
// is a position token.
func Record(ctx context.Context, tx pgx.Tx, entries ...Entry) (string, error) {
	evs := make([]events.Event, len(entries))
	for i, e := range entries {
		evs[i] = Event(ctx, e)
	}
	pos, err := events.Append(ctx, tx, evs...)
	if err != nil {
		return "", fmt.Errorf("record decision: %w", err)
	}
	return pos, nil
}

// Event returns the event of an entry, for callers that append several at once.
func Event(ctx context.Context, e Entry) events.Event {
	return event(e.proto(ctx), e.AllocationID)
}

// proto returns the entry as it is written. Its time is that of the event.
func (e Entry) proto(ctx context.Context) *commonv1.AuditEntry {
	c := obs.From(ctx)
	out := &commonv1.AuditEntry{
		Action: e.Action, Actor: Printable(actor(ctx, e.Actor)), Outcome: cmp.Or(e.Outcome, Done), Reason: text(e.Reason),
		SubjectType: e.SubjectType, SubjectId: Printable(e.SubjectID), TenantId: e.TenantID, WorkspaceId: e.WorkspaceID,
		WorkflowId: e.WorkflowID, NodeId: e.NodeID, CorrelationId: cmp.Or(e.CorrelationID, c.CorrelationID),
		Details: details(e.Details),
	}
	if e.Code != commonv1.Reason_REASON_UNSPECIFIED {
		put(out, "reason_code", names.Of(e.Code))
	}
	if e.AllocationID != "" && e.SubjectType != "allocation" {
		put(out, "allocation_id", e.AllocationID)
	}
	return out
}

// actor returns an empty string for a loop of a service: the event's source names the service.
func actor(ctx context.Context, given string) string {
	if given != "" {
		return given
	}
	if _, ok := rpc.PersonFrom(ctx); ok {
		return rpc.ActorFrom(ctx)
	}
	if _, ok := rpc.PeerFrom(ctx); ok {
		return rpc.ActorFrom(ctx)
	}
	return ""
}

func event(e *commonv1.AuditEntry, allocation string) events.Event {
	id := ids.New()
	return events.Event{
		ID: id, Kind: Kind, AggregateType: aggregate, AggregateID: id, AggregateVersion: 1, Payload: e, JSON: true,
		Correlation: events.Correlation{
			CorrelationID: e.GetCorrelationId(), TenantID: e.GetTenantId(), WorkspaceID: e.GetWorkspaceId(),
			WorkflowID: e.GetWorkflowId(), AllocationID: allocation, NodeID: e.GetNodeId(),
		},
	}
}

// Printable replaces every character that does not print, among them those that control a terminal or change the
// direction of the text after them: entries are printed on terminals, and the text that a person wrote has not been
// checked.
func Printable(s string) string {
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return unicode.ReplacementChar
		}
		return r
	}, s)
}

// text hides what looks like a secret, makes the rest printable and bounds it.
func text(s string) string {
	s = Printable(obs.Redact(strings.ToValidUTF8(s, "\uFFFD")))
	if len(s) <= maxReason {
		return s
	}
	s = s[:maxReason]
	for !utf8.ValidString(s) {
		s = s[:len(s)-1]
	}
	return s + "…"
}

// hash returns a name for a kind of entry that does not contain its parts.
func hash(parts ...string) string {
	h := sha256.New()
	for _, p := range parts {
		fmt.Fprintf(h, "%d:%s", len(p), p)
	}
	return hex.EncodeToString(h.Sum(nil)[:16])
}
