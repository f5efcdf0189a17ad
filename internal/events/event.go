package events

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
)

// Correlation holds the ids by which related events are found; an empty id is unknown.
type Correlation struct {
	CorrelationID  string `db:"correlation_id" expr:"COALESCE(@.correlation_uuid::text, @.correlation_id, '')"`
	TenantID       string `db:"tenant_id" expr:"COALESCE(@.tenant_uuid::text, @.tenant_id, '')"`
	WorkspaceID    string `db:"workspace_id" expr:"COALESCE(@.workspace_uuid::text, @.workspace_id, '')"`
	WorkflowID     string `db:"workflow_id" expr:"COALESCE(@.workflow_uuid::text, @.workflow_id, '')"`
	AllocationID   string `db:"allocation_id" expr:"COALESCE(@.allocation_uuid::text, @.allocation_id, '')"`
	TaskID         string `db:"task_id" expr:"COALESCE(@.task_uuid::text, @.task_id, CASE @.aggregate_type WHEN 'task' THEN @.aggregate_id END, '')"`
	NodeID         string `db:"node_id" expr:"COALESCE(@.node_uuid::text, @.node_id, '')"`
	NodeInstanceID string `db:"node_instance_id" expr:"COALESCE(@.node_instance_uuid::text, @.node_instance_id, '')"`
}

// Event is a fact to be appended.
type Event struct {
	// ID is a UUIDv7; empty draws one, unless the event is Unnamed.
	ID string
	// Unnamed marks an event that no caller waits for: it has no id, and so no entry in the index of ids. An event that is
	// stored as JSON has an id even if it is Unnamed.
	Unnamed bool
	// Kind names what happened, such as "workspace.state_changed".
	Kind string
	// AggregateType and AggregateID name the row whose change this is; AggregateVersion is the version it now has.
	AggregateType    string
	AggregateID      string
	AggregateVersion int64
	// Payload is the event's message; nil means none.
	Payload proto.Message
	// JSON stores the message as JSON, for events that the database itself reads or completes. All others are stored as
	// bytes.
	JSON bool
	Correlation
}

// Append inserts evs in the transaction of the state change, by one statement that pg.Queue sends with the next one or
// with the commit, and returns the id of the last one: the position token that a command returns. Call it after the
// update of the aggregate's row. The source is the role that tx is logged in as. After the commit, notify the
// sequencer's Wake.
func Append(ctx context.Context, tx pgx.Tx, evs ...Event) (string, error) {
	if len(evs) == 0 {
		return "", errors.New("append events: none given")
	}
	evs = slices.Clone(evs) // drawn ids are written into the copy
	contents := make([]content, len(evs))
	for i, e := range evs {
		if e.ID == "" && (e.JSON || !e.Unnamed) { // the audit log identifies its entries by their ids
			evs[i].ID = ids.New()
		}
		var err error
		if contents[i], err = e.content(); err != nil {
			return "", fmt.Errorf("append event %s: %w", e.Kind, err)
		}
	}
	insert, args := statementFor(evs, contents)
	if err := pg.Queue(ctx, tx, insert, args...); err != nil {
		return "", fmt.Errorf("append events: %w", err)
	}
	note(ctx)
	return evs[len(evs)-1].ID, nil
}

// statementFor returns the statement that inserts evs, and its arguments. Arrays cost both sides more than they save
// for one row.
func statementFor(evs []Event, contents []content) (*pg.Statement, []any) {
	belongs, uuids := belongings(evs)
	switch {
	case uuids && len(evs) == 1:
		return appendOneUUIDs, evs[0].uuidValues(contents[0], belongs)
	case uuids:
		return appendManyUUIDs, uuidColumns(evs, contents, belongs)
	case len(evs) == 1:
		return appendOne, evs[0].values(contents[0])
	}
	return appendMany, columns(evs, contents)
}

const (
	insertEvent = `
		INSERT INTO events.event (id, kind, aggregate_type, aggregate_id, aggregate_version, payload, body, body_type,
			correlation_id,
			tenant_id, workspace_id, workflow_id, allocation_id, task_id, node_id, node_instance_id)`
	insertUUIDs = `
		INSERT INTO events.event (id, kind, aggregate_type, aggregate_id, aggregate_version, payload, body, body_type,
			correlation_uuid,
			tenant_uuid, workspace_uuid, workflow_uuid, allocation_uuid, task_uuid, node_uuid, node_instance_uuid)`
)

var (
	appendOne = pg.DefineShared(writers, "events.append_one", insertEvent+`
		VALUES ($1, $2, $3, $4, $5, $6::text::jsonb, $7, $8, NULLIF($9::text, ''), NULLIF($10::text, ''),
			NULLIF($11::text, ''), NULLIF($12::text, ''), NULLIF($13::text, ''), NULLIF($14::text, ''),
			NULLIF($15::text, ''), NULLIF($16::text, ''))`)
	appendMany = pg.DefineShared(writers, "events.append_many", insertEvents(`e.aggregate_version`))
	appendSeen = pg.Define(pg.RoleNodeAPI, "events.append_seen",
		insertEvents(`(EXTRACT(EPOCH FROM mesh.clock()) * 1000000)::bigint - e.aggregate_version`))

	appendOneUUIDs = pg.DefineShared(writers, "events.append_one_uuids", insertUUIDs+`
		VALUES ($1, $2, $3, $4, $5, $6::text::jsonb, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16)`)
	appendManyUUIDs = pg.DefineShared(writers, "events.append_many_uuids", insertUUIDs+`
		SELECT e.id, e.kind, e.aggregate_type, e.aggregate_id, e.aggregate_version, e.payload::jsonb, e.body, e.body_type,
			e.c1, e.c2, e.c3, e.c4, e.c5, e.c6, e.c7, e.c8
		FROM unnest($1::uuid[], $2::text[], $3::text[], $4::text[], $5::bigint[], $6::text[], $7::bytea[], $8::text[],
			$9::uuid[],
			$10::uuid[], $11::uuid[], $12::uuid[], $13::uuid[], $14::uuid[], $15::uuid[], $16::uuid[]) WITH ORDINALITY
			AS e (id, kind, aggregate_type, aggregate_id, aggregate_version, payload, body, body_type, c1, c2, c3, c4, c5, c6,
				c7, c8, n)
		ORDER BY e.n`)
)

// insertEvents returns a statement that inserts the events of arrays; version is the expression for the version of
// each.
func insertEvents(version string) string {
	return insertEvent + `
		SELECT e.id, e.kind, e.aggregate_type, e.aggregate_id, ` + version + `, e.payload::jsonb, e.body, e.body_type,
			NULLIF(e.c1, ''), NULLIF(e.c2, ''), NULLIF(e.c3, ''), NULLIF(e.c4, ''),
			NULLIF(e.c5, ''), NULLIF(e.c6, ''), NULLIF(e.c7, ''), NULLIF(e.c8, '')
		FROM unnest($1::uuid[], $2::text[], $3::text[], $4::text[], $5::bigint[], $6::text[], $7::bytea[], $8::text[],
			$9::text[],
			$10::text[], $11::text[], $12::text[], $13::text[], $14::text[], $15::text[], $16::text[]) WITH ORDINALITY
			AS e (id, kind, aggregate_type, aggregate_id, aggregate_version, payload, body, body_type, c1, c2, c3, c4, c5, c6,
				c7, c8, n)
		ORDER BY e.n`
}

// texts returns the columns of the correlation, in the order of the statements.
func (c Correlation) texts() [8]string {
	return [8]string{
		c.CorrelationID, c.TenantID, c.WorkspaceID, c.WorkflowID, c.AllocationID, c.TaskID, c.NodeID,
		c.NodeInstanceID,
	}
}

// values returns the arguments of appendOne.
func (e Event) values(c content) []any {
	args := append(make([]any, 0, 16), e.common(c)...)
	for _, id := range e.texts() {
		args = append(args, id)
	}
	return args
}

// common returns the arguments that appendOne and appendOneUUIDs share.
func (e Event) common(c content) []any {
	id, _ := parseUUID(e.ID)
	return []any{id, e.Kind, e.AggregateType, e.AggregateID, e.AggregateVersion, c.json, c.body, c.bodyType}
}

// columns returns the arguments of appendMany.
func columns(evs []Event, contents []content) []any {
	var correlation [8][]string
	for _, e := range evs {
		for c, id := range e.texts() {
			correlation[c] = append(correlation[c], id)
		}
	}
	args := append(make([]any, 0, 16), commonColumns(evs, contents)...)
	for _, c := range correlation {
		args = append(args, c)
	}
	return args
}

// commonColumns returns the arguments that appendMany and appendManyUUIDs share.
func commonColumns(evs []Event, contents []content) []any {
	n := len(evs)
	eventIDs, versions := make(pgtype.FlatArray[pgtype.UUID], n), make([]int64, n)
	kinds, types, aggregates := make([]string, n), make([]string, n), make([]string, n)
	texts, bodies, bodyTypes := make([]*string, n), make([][]byte, n), make([]*string, n)
	for i, e := range evs {
		eventIDs[i], _ = parseUUID(e.ID)
		kinds[i], types[i], aggregates[i], versions[i] = e.Kind, e.AggregateType, e.AggregateID, e.AggregateVersion
		texts[i], bodies[i], bodyTypes[i] = contents[i].json, contents[i].body, contents[i].bodyType
	}
	return []any{eventIDs, kinds, types, aggregates, versions, texts, bodies, bodyTypes}
}
