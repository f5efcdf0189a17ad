package collect

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/tasktypes"
	"github.com/gpuaas/mesh/services/recovery/drift"
)

// The topics of what sessions tell of a part of a node beside whether it is heard.
const (
	topicClock     = "clock"
	TopicRuntime   = "runtime"
	topicAddresses = "addresses"
	topicTaskTypes = "task_types"
)

// factsRow is a row of recovery.host_facts.
type factsRow struct {
	NodeID     string    `db:"node_id" expr:"@.node_id::text"`
	Instance   string    `db:"node_instance_id" expr:"@.node_instance_id::text"`
	Accepted   string    `db:"accepted"`
	Present    string    `db:"present" expr:"COALESCE(@.present, '')"` // empty: as accepted
	AcceptedAt time.Time `db:"accepted_at"`
	AcceptedBy string    `db:"accepted_by"`
	Reason     string    `db:"accept_reason"`
	Addresses  []string  `db:"addresses"`
	Remotes    []string  `db:"remotes"`
	Lacks      []string  `db:"lacks"`
}

func (r *factsRow) equal(o *factsRow) bool {
	return r.Instance == o.Instance && r.Accepted == o.Accepted && r.Present == o.Present &&
		r.AcceptedAt.Equal(o.AcceptedAt) && r.AcceptedBy == o.AcceptedBy && r.Reason == o.Reason &&
		slices.Equal(r.Addresses, o.Addresses) && slices.Equal(r.Remotes, o.Remotes) && slices.Equal(r.Lacks, o.Lacks)
}

// reportsFacts reports whether an event of a session has facts that are compared with those before.
func reportsFacts(s *nodev1.SessionChanged) bool {
	return s.GetHost() != nil || len(s.GetTaskTypes()) > 0
}

// noteReported keeps what the newest session of a node tells beside that it serves.
func (n *Node) noteReported(s *nodev1.SessionChanged, serving bool, at time.Time, correlation string) {
	e := drift.Evidence{NodeID: n.NodeID, Source: drift.FromSession, ObservedAt: at, CorrelationID: correlation}
	if serving {
		n.clockReported(s, e)
		n.profileReported(s, at)
	}
	if !reportsFacts(s) || !ids.Valid(s.GetNodeInstanceId()) {
		return
	}
	if n.Facts == nil {
		n.Facts = &factsRow{NodeID: n.NodeID, Instance: s.GetNodeInstanceId(), AcceptedAt: at}
	}
	if n.Facts.Instance != s.GetNodeInstanceId() { // a new enrolment, as after a reimage: its facts are as they are to be
		n.Facts = &factsRow{NodeID: n.NodeID, Instance: s.GetNodeInstanceId(), AcceptedAt: at}
	}
	if s.GetHost() != nil {
		n.runtimeReported(RuntimeOf(s.GetHost()), e)
		n.addressesReported(addressesOf(s.GetHost()), remoteOf(s.GetRemoteAddress()), e)
	}
	if len(s.GetTaskTypes()) > 0 {
		n.taskTypesReported(s.GetTaskTypes(), e)
	}
}

func (n *Node) clockReported(s *nodev1.SessionChanged, e drift.Evidence) {
	e.Part = commonv1.DriftPart_DRIFT_PART_HOST
	if s.GetClockOffset().CheckValid() == nil && s.GetClockOffset().AsDuration() != 0 {
		e.Reason = commonv1.DriftReason_DRIFT_REASON_CLOCK_SKEW
		offset, side := s.GetClockOffset().AsDuration(), "ahead of"
		if offset < 0 {
			side = "behind"
		}
		e.Detail = fmt.Sprintf("the clock of the host is %s %s the database's", offset.Abs().Round(time.Second), side)
	}
	n.NoteTopic(topicClock, e)
}

// runtimeReported compares what workloads rest on with what was accepted. What was not known when it was accepted is
// taken as it is reported first.
func (n *Node) runtimeReported(is Runtime, e drift.Evidence) {
	if is.unknown() {
		return
	}
	accepted := is
	if n.Facts.Accepted != "" {
		var err error
		if accepted, err = RuntimeFrom(n.Facts.Accepted); err != nil {
			return // of a build that writes them in another form
		}
	}
	accepted = accepted.Completed(is)
	n.Facts.Accepted, n.Facts.Present = accepted.Text(), ""
	e.Part = commonv1.DriftPart_DRIFT_PART_HOST
	if e.Detail = is.Differences(accepted); e.Detail != "" {
		e.Reason = commonv1.DriftReason_DRIFT_REASON_HOST_RUNTIME_DRIFT
		n.Facts.Present = is.Text()
	}
	n.NoteTopic(TopicRuntime, e)
}

// addressesReported compares the addresses of the host with those that are recorded, and records them. The address from
// which its session came is recorded alone: it is a proxy's or a balancer's as often as the host's.
func (n *Node) addressesReported(addresses []string, remote string, e drift.Evidence) {
	first := len(n.Facts.Addresses) == 0
	detail := ""
	if !first {
		detail = addressesDiffer(n.Facts.Addresses, addresses)
	}
	n.Facts.Addresses = addresses
	if remote != "" && !slices.Contains(n.Facts.Remotes, remote) {
		n.Facts.Remotes = append([]string{remote}, n.Facts.Remotes[:min(len(n.Facts.Remotes), mostRemotes-1)]...)
	}
	if detail == "" {
		return
	}
	e.Part = commonv1.DriftPart_DRIFT_PART_HOST
	e.Reason, e.Detail = commonv1.DriftReason_DRIFT_REASON_NETWORK_FACTS_DRIFT, detail
	e.FreshUntil = e.ObservedAt.Add(n.settings.AddressesFresh)
	n.NoteTopic(topicAddresses, e)
}

// taskTypesReported compares the types of tasks that the agent knows with those that are queued and not optional.
func (n *Node) taskTypesReported(has []commonv1.TaskType, e drift.Evidence) {
	n.Facts.Lacks = []string{}
	for _, t := range tasktypes.Lacking(has) {
		if n.settings.required(t) {
			n.Facts.Lacks = append(n.Facts.Lacks, names.Of(t))
		}
	}
	e.Part = commonv1.DriftPart_DRIFT_PART_PROCESS
	if len(n.Facts.Lacks) > 0 {
		e.Reason = commonv1.DriftReason_DRIFT_REASON_VERSION_DRIFT
		e.Detail = "the agent does not know " + strings.Join(n.Facts.Lacks, ", ")
	}
	n.NoteTopic(topicTaskTypes, e)
	if e.Reason == 0 {
		e.Part, e.Source = commonv1.DriftPart_DRIFT_PART_TASKS, drift.FromTasks
		n.NoteTopic(topicTaskTypes, e)
	}
}

// typeRefused keeps that work was refused because the agent does not know its type. It does not count once an agent
// that knows the type has a session.
func (n *Node) typeRefused(r *lifecyclev1.TaskTypeRefused, at time.Time, correlation string) {
	kind := names.Of(r.GetType())
	if n.Facts == nil || !slices.Contains(n.Facts.Lacks, kind) {
		return
	}
	n.NoteTopic(topicTaskTypes, drift.Evidence{
		NodeID: n.NodeID, Part: commonv1.DriftPart_DRIFT_PART_TASKS, Source: drift.FromTasks, ObservedAt: at,
		Reason: commonv1.DriftReason_DRIFT_REASON_VERSION_DRIFT, Detail: "the agent refused " + kind +
			", which it does not know", CorrelationID: correlation,
	})
}

// NoteTopic keeps evidence of one topic of a part. That a topic is well is worth a row only in place of another.
func (n *Node) NoteTopic(topic string, e drift.Evidence) {
	if e.Reason == 0 && !slices.ContainsFunc(n.Evidence, func(k *Kept) bool { return k.is(e.Part, e.Source, topic) }) {
		return
	}
	n.noteOf(topic, e, 0)
}

var (
	readFacts = pg.Define(pg.RoleRecovery, "drift.read_facts", `
		SELECT `+pg.Columns[factsRow]("f")+` FROM recovery.host_facts f WHERE f.node_id = ANY ($1::uuid[])`)

	writeFacts = pg.Define(pg.RoleRecovery, "drift.write_facts", `
		INSERT INTO recovery.host_facts AS f (node_id, node_instance_id, accepted, present, accepted_at, accepted_by,
			accept_reason, addresses, remotes, lacks)
		VALUES ($1, $2, $3, NULLIF($4, ''), $5, $6, $7, $8, $9, $10)
		ON CONFLICT (node_id) DO UPDATE SET node_instance_id = EXCLUDED.node_instance_id, accepted = EXCLUDED.accepted,
			present = EXCLUDED.present, accepted_at = EXCLUDED.accepted_at, accepted_by = EXCLUDED.accepted_by,
			accept_reason = EXCLUDED.accept_reason, addresses = EXCLUDED.addresses, remotes = EXCLUDED.remotes,
			lacks = EXCLUDED.lacks`)
)

// LoadFacts adds the stored facts of hosts to their nodes.
func LoadFacts(ctx context.Context, tx pgx.Tx, nodes map[string]*Node, of []string) error {
	if len(of) == 0 {
		return nil
	}
	rows, err := pg.All[factsRow](ctx, tx, readFacts, of)
	if err != nil {
		return fmt.Errorf("read facts of hosts: %w", err)
	}
	for _, r := range rows {
		if n := nodes[r.NodeID]; n != nil {
			stored := r
			n.Facts, n.factsWere = &r, &stored
		}
	}
	return nil
}

// saveFacts writes the facts of hosts that have changed.
func saveFacts(ctx context.Context, tx pgx.Tx, nodes map[string]*Node) error {
	for _, id := range IDsOf(nodes) {
		f, was := nodes[id].Facts, nodes[id].factsWere
		if f == nil || was != nil && f.equal(was) {
			continue
		}
		err := pg.Queue(ctx, tx, writeFacts, f.NodeID, f.Instance, f.Accepted, f.Present, f.AcceptedAt, f.AcceptedBy,
			f.Reason, some(f.Addresses), some(f.Remotes), some(f.Lacks))
		if err != nil {
			return fmt.Errorf("write facts of a host: %w", err)
		}
	}
	return nil
}

// some returns a list that is not nil.
func some(list []string) []string {
	if list == nil {
		return []string{}
	}
	return list
}
