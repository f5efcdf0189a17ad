package collect

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/recovery/drift"
)

// EveryNode is the id under which evidence about the control plane, and the verdict on it, are stored.
const EveryNode = "00000000-0000-0000-0000-000000000000"

// NodeRow is a row of recovery.judgement.
type NodeRow struct {
	NodeID         string     `db:"node_id" expr:"@.node_id::text"`
	State          string     `db:"identity_state"`
	SessionID      string     `db:"session_id" expr:"COALESCE(@.session_id::text, '')"`
	Generation     int64      `db:"generation"`
	SessionVersion int64      `db:"session_version"`
	ReplicaID      string     `db:"replica_id" expr:"COALESCE(@.replica_id::text, '')"` // empty: none serves it
	SilentSince    *time.Time `db:"silent_since"`
	DueAt          *time.Time `db:"due_at"`
	proofRow
}

// proofRow are the columns of a node's row that prove it healthy, or say what is done about it.
type proofRow struct {
	InstanceID       string     `db:"node_instance_id"` // the present enrolment
	Serial           string     `db:"serial"`           // of its current certificate
	Issuer           string     `db:"issuer"`           // fingerprint of what signed that
	SessionSerial    string     `db:"session_serial"`   // with which the session SerialGeneration was opened
	SerialGeneration int64      `db:"serial_generation"`
	Wanted           bool       `db:"probe_wanted"` // a reason has ended or it enrolled, and no probe has completed since
	ProbeDue         *time.Time `db:"probe_due"`    // when lifecycle is asked next; nil: something else is missing first
	ProbeAttempt     int32      `db:"probe_attempt"`
	ProbeNote        string     `db:"probe_note"` // what became of the last probe that did not succeed
	ProbeInstance    string     `db:"probe_instance"`
	ProbeGeneration  int64      `db:"probe_generation"`
	ProbedAt         *time.Time `db:"probed_at"` // nil: no probe has succeeded since the last reason
	TasksAt          *time.Time `db:"tasks_at"`  // nil: not known since the last reason
}

// evidenceRow is a row of recovery.evidence.
type evidenceRow struct {
	NodeID        string     `db:"node_id" expr:"@.node_id::text"`
	Part          string     `db:"part"` // PART or PART/TOPIC; a build without topics sets the latter aside as unread
	Source        string     `db:"source"`
	Reason        string     `db:"reason"`
	ObservedAt    time.Time  `db:"observed_at"`
	FreshUntil    *time.Time `db:"fresh_until"`
	Detail        string     `db:"detail"`
	CorrelationID string     `db:"correlation_id"`
	Version       int64      `db:"version"`
}

// Kept is evidence as it is stored, with the version of the source's row.
type Kept struct {
	drift.Evidence
	Topic   string // of what there is beside each other of one part; empty: the part as a whole
	version int64
	was     *drift.Evidence // as it is stored; nil: it is not
	written int64           // the version that is stored
}

// news reports whether the evidence differs from what is stored.
func (k *Kept) news() bool { return k.was == nil || !k.same(*k.was) }

// is reports whether the evidence is of a topic of a part by a source.
func (k *Kept) is(part commonv1.DriftPart, source commonv1.EvidenceSource, topic string) bool {
	return k.Part == part && k.Source == source && k.Topic == topic
}

// Heard reports whether the evidence is that of sessions on whether the agent is heard.
func (k *Kept) Heard() bool {
	return k.is(commonv1.DriftPart_DRIFT_PART_PROCESS, drift.FromSession, "")
}

// same reports whether a source saw the same once more.
func (k *Kept) same(e drift.Evidence) bool {
	return k.Reason == e.Reason && k.Detail == e.Detail && k.FreshUntil.Equal(e.FreshUntil)
}

func (r evidenceRow) read() (*Kept, error) {
	part, topic, _ := strings.Cut(r.Part, "/")
	out := &Kept{Topic: topic, version: r.Version, written: r.Version, Evidence: drift.Evidence{
		NodeID: r.NodeID, ObservedAt: r.ObservedAt, Detail: r.Detail, CorrelationID: r.CorrelationID,
	}}
	if r.NodeID == EveryNode {
		out.NodeID = ""
	}
	if r.FreshUntil != nil {
		out.FreshUntil = *r.FreshUntil
	}
	var err error
	if out.Part, err = names.Parse[commonv1.DriftPart](part); err != nil {
		return nil, err
	}
	if out.Source, err = names.Parse[commonv1.EvidenceSource](r.Source); err != nil {
		return nil, err
	}
	if out.Reason, err = names.Parse[commonv1.DriftReason](r.Reason); err != nil {
		return nil, err
	}
	stored := out.Evidence
	out.was = &stored
	return out, nil
}

var (
	lockNodes = pg.Define(pg.RoleRecovery, "drift.lock_nodes", `
		SELECT `+pg.Columns[NodeRow]("j")+` FROM recovery.judgement j
		WHERE j.node_id = ANY ($1::uuid[]) ORDER BY j.node_id FOR UPDATE`)

	readEvidence = pg.Define(pg.RoleRecovery, "drift.read_evidence", `
		SELECT `+pg.Columns[evidenceRow]("e")+` FROM recovery.evidence e
		WHERE e.node_id = ANY ($1::uuid[]) ORDER BY e.node_id, e.part, e.source`)

	writeEvidence = pg.Define(pg.RoleRecovery, "drift.write_evidence", `
		INSERT INTO recovery.evidence (node_id, part, source, reason, observed_at, fresh_until, detail, correlation_id,
			version)
		SELECT n.node_id, n.part, n.source, n.reason, n.observed_at, n.fresh_until, n.detail, n.correlation_id, n.version
		FROM unnest($1::uuid[], $2::text[], $3::text[], $4::text[], $5::timestamptz[], $6::timestamptz[], $7::text[],
			$8::text[], $9::bigint[])
			AS n (node_id, part, source, reason, observed_at, fresh_until, detail, correlation_id, version)
		ON CONFLICT (node_id, part, source) DO UPDATE SET reason = EXCLUDED.reason, observed_at = EXCLUDED.observed_at,
			fresh_until = EXCLUDED.fresh_until, detail = EXCLUDED.detail, correlation_id = EXCLUDED.correlation_id,
			version = EXCLUDED.version`)
)

// LoadEvidence adds what is stored about nodes to them. A node with evidence that this build cannot read is marked: a
// verdict without it may be milder than what is proven.
func LoadEvidence(ctx context.Context, tx pgx.Tx, nodes map[string]*Node) error {
	rows, err := pg.All[evidenceRow](ctx, tx, readEvidence, IDsOf(nodes))
	if err != nil {
		return fmt.Errorf("read evidence: %w", err)
	}
	for _, r := range rows {
		e, err := r.read()
		if err != nil {
			nodes[r.NodeID].Unread = err
			continue
		}
		nodes[r.NodeID].Evidence = append(nodes[r.NodeID].Evidence, e)
	}
	return nil
}

// SaveEvidence writes evidence as it is, in one statement.
func SaveEvidence(ctx context.Context, tx pgx.Tx, list []*Kept) error {
	if len(list) == 0 {
		return nil
	}
	var nodeIDs, parts, froms, reasons, details, correlations []string
	var observed []time.Time
	var until []*time.Time
	var versions []int64
	for _, e := range list {
		id := e.NodeID
		if id == "" {
			id = EveryNode
		}
		part := names.Of(e.Part)
		if e.Topic != "" {
			part += "/" + e.Topic
		}
		nodeIDs, parts, froms = append(nodeIDs, id), append(parts, part), append(froms, names.Of(e.Source))
		reasons, details = append(reasons, names.Of(e.Reason)), append(details, e.Detail)
		correlations = append(correlations, e.CorrelationID)
		observed, versions = append(observed, e.ObservedAt), append(versions, e.version)
		var fresh *time.Time
		if !e.FreshUntil.IsZero() {
			fresh = &e.FreshUntil
		}
		until = append(until, fresh)
	}
	err := pg.Queue(ctx, tx, writeEvidence, nodeIDs, parts, froms, reasons, observed, until, details, correlations,
		versions)
	if err != nil {
		return fmt.Errorf("write evidence: %w", err)
	}
	return nil
}

// IDsOf returns the ids of nodes in their order, in which rows are locked.
func IDsOf(nodes map[string]*Node) []string {
	out := make([]string, 0, len(nodes))
	for id := range nodes {
		out = append(out, id)
	}
	slices.Sort(out)
	return out
}
