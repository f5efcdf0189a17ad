package gate

import (
	"context"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
)

// View has the columns of a gate that a lease or a report needs.
type View struct {
	NodeID       string `db:"node_id" expr:"@.node_id::text"`
	InstanceID   string `db:"node_instance_id" expr:"coalesce(@.node_instance_id::text, '')"` // of the node
	Admitted     bool   `db:"admitted"`
	SessionEpoch int64  `db:"session_epoch"`
	LedgerID     string `db:"ledger_id" expr:"coalesce(@.ledger_id::text, '')"`
	// TaskKeys are the keys by which the agent verifies tasks; nil: it reports none, and has those of its enrolment.
	TaskKeys []string `db:"task_keys" expr:"CASE WHEN @.task_keys_epoch = @.session_epoch THEN @.task_keys END"`
}

// Views are gates by node.
type Views map[string]View

// LockForWork reads gates under FOR SHARE in the order of their ids, so that a fence waits for transactions that have
// locked them, and later ones see the fence.
func LockForWork(ctx context.Context, tx pgx.Tx, nodeIDs []string) (Views, error) {
	var batch pg.Batch
	out := QueueLockForWork(&batch, nodeIDs)
	if err := batch.Send(ctx, tx); err != nil {
		return nil, fmt.Errorf("lock gates: %w", err)
	}
	return out, nil
}

// QueueLockForWork is LockForWork as a part of a batch: the map that it returns is filled in when the batch is sent.
// Statements behind it in the batch read the rows as of the time when the locks were taken, or later: in READ COMMITTED
// each statement takes its snapshot as it begins, and it begins when the one before has ended. A statement that joins
// the gates therefore sees the locked rows, however long the batch waited for a fence. A single statement would not do:
// its snapshot is older than its locks.
func QueueLockForWork(batch *pg.Batch, nodeIDs []string) Views {
	out := make(Views, len(nodeIDs))
	batch.Queue(lockGatesForWork, nodeIDs).Query(func(rows pgx.Rows) error {
		clear(out) // the transaction may be tried again
		list, err := pgx.CollectRows(rows, pgx.RowToStructByName[View])
		for _, b := range list {
			out[b.NodeID] = b
		}
		return err
	})
	return out
}

// taskKeysSQL is the SQL of the keys that the agent behind the gate g has reported in the session that the gate was
// last raised to; NULL: none.
const taskKeysSQL = `CASE WHEN g.task_keys_epoch = g.session_epoch THEN g.task_keys END`

// AdmittedSQL is the condition that reports of the node of gate g are applied, as View.Admitted.
const AdmittedSQL = `g.admitted`

// MayLeaseSQL returns the condition that the gate g is open to a session of the generation and its agent has the key,
// as in MayLease.
func MayLeaseSQL(generation, keyID string) string {
	return `g.admitted AND g.session_epoch = ` + generation + ` AND (` + taskKeysSQL + ` IS NULL OR ` + keyID +
		` = ANY (` + taskKeysSQL + `))`
}

// DiagnosisOnlySQL is the condition that the node of gate g is cordoned and its verdict of host_runtime_drift asks for
// that: only tasks that start nothing on it are leased (task.StartsNothing). Where another has cordoned the node, the
// verdict counts beside that cordon.
const DiagnosisOnlySQL = `(g.cordoned AND (g.cordoned_by = '` + ofRuntime + `' OR EXISTS (
	SELECT FROM lifecycle.verdict_cordon drift
	WHERE drift.node_id = g.node_id AND drift.reason <> '' AND NOT drift.withheld)))`

var diagnosisOnly = pg.Define(pg.RoleLifecycle, "gate.diagnosis_only", `
	SELECT coalesce(nullif(v.reason, ''), g.cordon_reason) FROM lifecycle.node_gate g
		LEFT JOIN lifecycle.verdict_cordon v ON v.node_id = g.node_id
	WHERE g.node_id = $1 AND `+DiagnosisOnlySQL)

// DiagnosisOnly returns why nothing is started on a node whose host is not as it was accepted; empty if work of every
// type is leased.
func DiagnosisOnly(ctx context.Context, q pg.Querier, nodeID string) (string, error) {
	reason, err := pg.Value[string](ctx, q, diagnosisOnly, nodeID)
	if pg.IsNoRows(err) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("read whether the node is for diagnosis only: %w", err)
	}
	return "cordoned by " + ofRuntime + ": " + reason, nil
}

// HoldsSigningKeySQL is the condition that the agent behind the gate g has the key that signs tasks. It is true as well
// if there is no such key or the agent reports no keys.
const HoldsSigningKeySQL = `coalesce((SELECT k.key_id FROM mesh.signing_key k
	WHERE k.kind = 'task_signing' AND k.state = 'signing') = ANY (` + taskKeysSQL + `), true)`

// MayLease returns a fault unless the gate is open to the session of this generation and its agent has the key that
// signs, as far as it reports its keys.
func (b View) MayLease(generation int64, keyID string) error {
	if b.NodeID == "" || !b.Admitted || b.SessionEpoch != generation {
		return fault.New(commonv1.Reason_REASON_NODE_NOT_ADMITTED, "the gate of this node is not open to this session")
	}
	if b.TaskKeys != nil && !slices.Contains(b.TaskKeys, keyID) {
		return fault.New(commonv1.Reason_REASON_TASK_KEY_NOT_HELD,
			"the agent of this node does not hold key "+keyID+" of tasks yet")
	}
	return nil
}
