package testkit

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/pg"
)

// Event is an event of the log with its message as JSON.
type Event struct {
	events.Record

	Seq     int64 `db:"seq"`
	Message any   `db:"-"`
}

// Text returns the text, number or truth value at a path of the message, by names of fields and places in lists; "" if
// there is nothing.
func (e Event) Text(path ...string) string {
	at := e.Message
	for _, name := range path {
		switch in := at.(type) {
		case map[string]any:
			at = in[name]
		case []any:
			n, err := strconv.Atoi(name)
			if err != nil || n < 0 || n >= len(in) {
				return ""
			}
			at = in[n]
		default:
			return ""
		}
	}
	if at == nil {
		return ""
	}
	return fmt.Sprint(at)
}

// EventRows is the FROM item of queries of events: the columns of ids are texts, however they are stored.
var EventRows = func() string {
	var columns strings.Builder
	columns.WriteString("xid, seq, source, id, kind, aggregate_type, aggregate_id, aggregate_version, payload, body, " +
		"body_type, created_at")
	for _, c := range []string{
		"correlation", "tenant", "workspace", "workflow", "allocation", "task", "node",
		"node_instance",
	} {
		fmt.Fprintf(&columns, ", COALESCE(%[1]s_uuid::text, %[1]s_id) AS %[1]s_id, NULL::uuid AS %[1]s_uuid", c)
	}
	return "(SELECT " + columns.String() + " FROM events.event) AS event"
}()

// Events returns the events, numbered or not, for which a condition on the columns of events.event holds, in the order
// of their seq.
func Events(tb testing.TB, q pg.Querier, where string, args ...any) []Event {
	tb.Helper()
	list, err := ReadEvents(Context(tb), q, where, args...)
	if err != nil {
		tb.Fatal(err)
	}
	return list
}

// ReadEvents does the same as Events for a caller without a testing.TB, or one that waits.
func ReadEvents(ctx context.Context, q pg.Querier, where string, args ...any) ([]Event, error) {
	rows, err := q.Query(ctx, `SELECT `+pg.Columns[Event]("event")+` FROM `+EventRows+` WHERE `+where+` ORDER BY seq`,
		args...)
	if err != nil {
		return nil, fmt.Errorf("read events: %w", err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByName[Event])
	if err != nil {
		return nil, fmt.Errorf("read events: %w", err)
	}
	for i, e := range list {
		raw, err := e.Payload()
		if err == nil {
			err = json.Unmarshal(raw, &list[i].Message)
		}
		if err != nil {
			return nil, fmt.Errorf("read events: %w", err)
		}
	}
	return list, nil
}
