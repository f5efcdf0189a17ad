package events

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
)

// Correlation holds the ids that tie together what belongs together; empty ones are unknown.
type Correlation struct {
	CorrelationID  string
	TenantID       string
	WorkspaceID    string
	WorkflowID     string
	AllocationID   string
	TaskID         string
	NodeID         string
	NodeInstanceID string
}

// Event is a fact to be appended.
type Event struct {
	// ID is a UUIDv7; empty draws one.
	ID string
	// Kind says what happened, such as "workspace.state_changed".
	Kind string
	// AggregateType and AggregateID name the row whose change this is; AggregateVersion is the version it now has.
	AggregateType    string
	AggregateID      string
	AggregateVersion int64
	// Payload is the event's body; nil means an empty object.
	Payload proto.Message
	Correlation
}

// Append inserts evs in the transaction of the state change, in one statement (which pg.Queue sends with the next one or the commit), and returns the id of the last one: the
// position token that a command answers. It belongs after the update of the aggregate's row. The source is the role
// that tx is logged in as. After the commit, notify the sequencer's Wake.
func Append(ctx context.Context, tx pgx.Tx, evs ...Event) (string, error) {
	if len(evs) == 0 {
		return "", errors.New("append events: none given")
	}
	n := len(evs)
	eventIDs, kinds, types, aggregates := make([]string, n), make([]string, n), make([]string, n), make([]string, n)
	versions, payloads := make([]int64, n), make([]string, n)
	correlation := make([][]string, 8)
	for i := range correlation {
		correlation[i] = make([]string, n)
	}
	for i, e := range evs {
		if e.ID == "" {
			e.ID = ids.New()
		}
		payload, err := marshal(e.Payload)
		if err != nil {
			return "", fmt.Errorf("append event %s: %w", e.Kind, err)
		}
		eventIDs[i], kinds[i], types[i], aggregates[i] = e.ID, e.Kind, e.AggregateType, e.AggregateID
		versions[i], payloads[i] = e.AggregateVersion, payload
		for c, id := range []string{
			e.CorrelationID, e.TenantID, e.WorkspaceID, e.WorkflowID, e.AllocationID, e.TaskID, e.NodeID, e.NodeInstanceID,
		} {
			correlation[c][i] = id
		}
	}
	err := pg.Queue(ctx, tx, `
		INSERT INTO events.event (id, kind, aggregate_type, aggregate_id, aggregate_version, payload, correlation_id, tenant_id,
			workspace_id, workflow_id, allocation_id, task_id, node_id, node_instance_id)
		SELECT e.id, e.kind, e.aggregate_type, e.aggregate_id, e.aggregate_version, e.payload::jsonb,
			NULLIF(e.c1, ''), NULLIF(e.c2, ''), NULLIF(e.c3, ''), NULLIF(e.c4, ''),
			NULLIF(e.c5, ''), NULLIF(e.c6, ''), NULLIF(e.c7, ''), NULLIF(e.c8, '')
		FROM unnest($1::uuid[], $2::text[], $3::text[], $4::text[], $5::bigint[], $6::text[], $7::text[], $8::text[], $9::text[],
			$10::text[], $11::text[], $12::text[], $13::text[], $14::text[]) WITH ORDINALITY
			AS e (id, kind, aggregate_type, aggregate_id, aggregate_version, payload, c1, c2, c3, c4, c5, c6, c7, c8, n)
		ORDER BY e.n`,
		eventIDs, kinds, types, aggregates, versions, payloads, correlation[0], correlation[1], correlation[2], correlation[3],
		correlation[4], correlation[5], correlation[6], correlation[7])
	if err != nil {
		return "", fmt.Errorf("append events: %w", err)
	}
	return eventIDs[n-1], nil
}

func marshal(m proto.Message) (string, error) {
	if m == nil {
		return "{}", nil
	}
	b, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(m)
	if err != nil {
		return "", fmt.Errorf("marshal payload: %w", err)
	}
	return string(b), nil
}

// Record is a numbered event as readers get it.
type Record struct {
	Pos              int64
	ID               string
	Source           string
	Kind             string
	AggregateType    string
	AggregateID      string
	AggregateVersion int64
	Payload          json.RawMessage
	CreatedAt        time.Time
	Correlation
}

// Decode reads the payload into m. Fields that m does not know are passed over: the writer may be newer.
func (r Record) Decode(m proto.Message) error {
	if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(r.Payload, m); err != nil {
		return fmt.Errorf("decode event %s at %d: %w", r.Kind, r.Pos, err)
	}
	return nil
}
