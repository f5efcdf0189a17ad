package workspace

import (
	"encoding/json"
	"time"

	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/pg"
)

// Row is a row of workspace.
type Row struct {
	ID               string          `db:"id"`
	TenantID         string          `db:"tenant_id"`
	Tenant           string          `db:"tenant" expr:"COALESCE((SELECT t.name FROM lifecycle.tenant t WHERE t.id = @.tenant_id), '')"` // name
	Name             string          `db:"name"`
	Spec             json.RawMessage `db:"spec"`
	SpecDigest       string          `db:"spec_digest"`
	DesiredState     string          `db:"desired_state"`
	State            string          `db:"state"`
	Epoch            int64           `db:"epoch"`
	OpSeq            int64           `db:"op_seq"`
	RunID            string          `db:"run_id" expr:"COALESCE(@.run_id::text, '')"`
	LastErrorCode    string          `db:"last_error_code"`
	LastError        string          `db:"last_error"`
	RegisterFailures int             `db:"register_failures"`
	RetryUsed        int             `db:"retry_used"`
	RetryWindowStart *time.Time      `db:"retry_window_start"`
	ResetDone        bool            `db:"reset_done"`
	NodeID           string          `db:"node_id" expr:"COALESCE(@.node_id::text, '')"`
	NodeName         string          `db:"node_name"`
	Endpoints        json.RawMessage `db:"endpoints"`
	CreatedBy        string          `db:"created_by"`
	CreatedAt        time.Time       `db:"created_at"`
	StateAt          time.Time       `db:"state_at"`
	Version          int64           `db:"version"`
}

// Event returns the event of the row as it is.
func (w *Row) Event() (events.Event, error) {
	payload, err := w.Proto()
	if err != nil {
		return events.Event{}, err
	}
	return events.Event{
		Kind: "workspace.changed", AggregateType: "workspace", AggregateID: w.ID, AggregateVersion: w.Version,
		Payload:     payload,
		Correlation: events.Correlation{TenantID: w.TenantID, WorkspaceID: w.ID, WorkflowID: w.RunID, NodeID: w.NodeID},
	}, nil
}

// Columns is the select list of a row w of workspace.
var Columns = pg.Columns[Row]("w")
