package events

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
)

// Correlation holds the ids that tie together what belongs together; empty ones are unknown.
type Correlation struct {
	CorrelationID  string `db:"correlation_id" expr:"COALESCE(@.correlation_id, '')"`
	TenantID       string `db:"tenant_id" expr:"COALESCE(@.tenant_id, '')"`
	WorkspaceID    string `db:"workspace_id" expr:"COALESCE(@.workspace_id, '')"`
	WorkflowID     string `db:"workflow_id" expr:"COALESCE(@.workflow_id, '')"`
	AllocationID   string `db:"allocation_id" expr:"COALESCE(@.allocation_id, '')"`
	TaskID         string `db:"task_id" expr:"COALESCE(@.task_id, CASE @.aggregate_type WHEN 'task' THEN @.aggregate_id END, '')"`
	NodeID         string `db:"node_id" expr:"COALESCE(@.node_id, '')"`
	NodeInstanceID string `db:"node_instance_id" expr:"COALESCE(@.node_instance_id, '')"`
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
	// Payload is the event's message; nil means none.
	Payload proto.Message
	// JSON stores the message as JSON, for events that the database itself reads or completes. All others are stored as bytes.
	JSON bool
	Correlation
}

// Append inserts evs in the transaction of the state change, by one statement that pg.Queue sends with the next one or with the commit, and returns the
// id of the last one: the position token that a command answers. It belongs after the update of the aggregate's row. The source is the role that tx is
// logged in as. After the commit, notify the sequencer's Wake.
func Append(ctx context.Context, tx pgx.Tx, evs ...Event) (string, error) {
	if len(evs) == 0 {
		return "", errors.New("append events: none given")
	}
	evs = slices.Clone(evs) // ids are drawn into it
	contents := make([]content, len(evs))
	for i, e := range evs {
		if e.ID == "" {
			evs[i].ID = ids.New()
		}
		var err error
		if contents[i], err = e.content(); err != nil {
			return "", fmt.Errorf("append event %s: %w", e.Kind, err)
		}
	}
	insert, args := appendOne, evs[0].values(contents[0])
	if len(evs) > 1 { // arrays cost both sides more than they save for one row
		insert, args = appendMany, columns(evs, contents)
	}
	if err := pg.Queue(ctx, tx, insert, args...); err != nil {
		return "", fmt.Errorf("append events: %w", err)
	}
	return evs[len(evs)-1].ID, nil
}

const insertEvent = `
		INSERT INTO events.event (id, kind, aggregate_type, aggregate_id, aggregate_version, payload, body, body_type, correlation_id,
			tenant_id, workspace_id, workflow_id, allocation_id, task_id, node_id, node_instance_id)`

var (
	appendOne = pg.DefineShared(writers, "events.append_one", insertEvent+`
		VALUES ($1, $2, $3, $4, $5, $6::text::jsonb, $7, $8, NULLIF($9::text, ''), NULLIF($10::text, ''), NULLIF($11::text, ''),
			NULLIF($12::text, ''), NULLIF($13::text, ''), NULLIF($14::text, ''), NULLIF($15::text, ''), NULLIF($16::text, ''))`)
	appendMany = pg.DefineShared(writers, "events.append_many", insertEvents(`e.aggregate_version`))
	appendSeen = pg.Define(pg.RoleNodeAPI, "events.append_seen",
		insertEvents(`(EXTRACT(EPOCH FROM mesh.clock()) * 1000000)::bigint - e.aggregate_version`))
)

// insertEvents inserts the events of arrays; version is what each gets.
func insertEvents(version string) string {
	return insertEvent + `
		SELECT e.id, e.kind, e.aggregate_type, e.aggregate_id, ` + version + `, e.payload::jsonb, e.body, e.body_type,
			NULLIF(e.c1, ''), NULLIF(e.c2, ''), NULLIF(e.c3, ''), NULLIF(e.c4, ''),
			NULLIF(e.c5, ''), NULLIF(e.c6, ''), NULLIF(e.c7, ''), NULLIF(e.c8, '')
		FROM unnest($1::uuid[], $2::text[], $3::text[], $4::text[], $5::bigint[], $6::text[], $7::bytea[], $8::text[], $9::text[],
			$10::text[], $11::text[], $12::text[], $13::text[], $14::text[], $15::text[], $16::text[]) WITH ORDINALITY
			AS e (id, kind, aggregate_type, aggregate_id, aggregate_version, payload, body, body_type, c1, c2, c3, c4, c5, c6, c7, c8, n)
		ORDER BY e.n`
}

// columnTexts are the columns of the event's correlation as they are stored: the id of a task whose change it is stands in aggregate_id already.
func (e Event) columnTexts() [8]string {
	c := e.Correlation
	if e.AggregateType == "task" && c.TaskID == e.AggregateID {
		c.TaskID = ""
	}
	return c.texts()
}

// texts are the columns of the correlation, in the order of the statements.
func (c Correlation) texts() [8]string {
	return [8]string{c.CorrelationID, c.TenantID, c.WorkspaceID, c.WorkflowID, c.AllocationID, c.TaskID, c.NodeID, c.NodeInstanceID}
}

// values are the arguments of appendOne.
func (e Event) values(c content) []any {
	args := append(make([]any, 0, 16), e.ID, e.Kind, e.AggregateType, e.AggregateID, e.AggregateVersion, c.json, c.body, c.bodyType)
	for _, id := range e.columnTexts() {
		args = append(args, id)
	}
	return args
}

// columns are the arguments of appendMany.
func columns(evs []Event, contents []content) []any {
	n := len(evs)
	eventIDs, kinds, types, aggregates, versions := make([]string, n), make([]string, n), make([]string, n), make([]string, n), make([]int64, n)
	texts, bodies, bodyTypes := make([]*string, n), make([][]byte, n), make([]*string, n)
	var correlation [8][]string
	for i := range correlation {
		correlation[i] = make([]string, n)
	}
	for i, e := range evs {
		eventIDs[i], kinds[i], types[i], aggregates[i], versions[i] = e.ID, e.Kind, e.AggregateType, e.AggregateID, e.AggregateVersion
		texts[i], bodies[i], bodyTypes[i] = contents[i].json, contents[i].body, contents[i].bodyType
		for c, id := range e.columnTexts() {
			correlation[c][i] = id
		}
	}
	args := append(make([]any, 0, 16), eventIDs, kinds, types, aggregates, versions, texts, bodies, bodyTypes)
	for _, c := range correlation {
		args = append(args, c)
	}
	return args
}
