package judge_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/recovery/drift/ask"
	"github.com/gpuaas/mesh/services/recovery/drift/collect"
)

// requested returns nodes that are back after a verdict, whose requests wait.
func (k *kit) requested(count int) []*machine {
	k.t.Helper()
	out := make([]*machine, count)
	for i := range out {
		out[i] = k.up()
	}
	k.away(out...)
	for _, n := range out {
		k.back(n)
	}
	k.round()
	if got := k.waiting(); got != count {
		k.t.Fatalf("%d requests wait", got)
	}
	return out
}

// places returns how many requests have a place.
func (k *kit) places() int {
	k.t.Helper()
	return k.count(`SELECT count(*) FROM recovery.record_request WHERE asked_at IS NOT NULL`)
}

// TestARefusedQuestionLastsAnHour checks that a request whose node lifecycle refuses ends after an hour however often
// it was refused, and that one of a node that leaves after a refusal lives as long.
func TestARefusedQuestionLastsAnHour(t *testing.T) {
	k := newKit(t)
	nodes := k.requested(2)
	records := &fakeRecords{refuses: commonv1.Reason_REASON_NODE_NOT_CONNECTED}
	a := k.asker(records)
	if k.asks(a) != 2 {
		t.Fatal("not all are asked")
	}
	k.lose(nodes[0])
	for range 50 {
		k.pass(time.Minute)
		if k.asks(a) != 1 || k.waiting() != 2 {
			t.Fatalf("%d requests are left %s after the first", k.waiting(), k.ahead)
		}
	}
	k.pass(10 * time.Minute)
	if k.asks(a) != 0 || k.waiting() != 0 {
		t.Errorf("%d requests after an hour", k.waiting())
	}
}

// TestOneBadQuestionStopsNoOther checks that a request which lifecycle refuses as a whole for one of its nodes is made
// for the others, and that the one which is refused alone ends.
func TestOneBadQuestionStopsNoOther(t *testing.T) {
	k := newKit(t)
	bad := k.requested(3)[1].id()
	records := &fakeRecords{fails: func(req *lifecyclev1.CollectRecordsRequest) error {
		for _, n := range req.GetNodes() {
			if n.GetNodeId() == bad {
				return fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT, "")
			}
		}
		return nil
	}}
	k.asks(k.asker(records))
	if len(records.tasks) != 2 || k.waiting() != 2 || k.places() != 2 {
		t.Errorf("%d tasks, %d requests, %d places", len(records.tasks), k.waiting(), k.places())
	}
}

// TestQuestionsWaitForLifecycle checks that while lifecycle does not answer, or is of a build without the service,
// requests wait without a place and are made again, which one line of the log says; and that the time of a task counts
// from the first answer that has it.
func TestQuestionsWaitForLifecycle(t *testing.T) {
	k := newKit(t)
	k.requested(2)
	records := &fakeRecords{}
	var lines bytes.Buffer
	a, err := ask.New(ask.Deps{
		Logger: slog.New(slog.NewTextHandler(&lines, nil)), Pool: k.db.Pool(pg.RoleRecovery), Records: records,
	})
	k.must(err)
	for _, reason := range []commonv1.Reason{
		commonv1.Reason_REASON_UNAVAILABLE, commonv1.Reason_REASON_UNIMPLEMENTED, commonv1.Reason_REASON_DEADLINE_EXCEEDED,
	} {
		records.fails = func(*lifecyclev1.CollectRecordsRequest) error { return fault.New(reason, "") }
		if k.asks(a) != 2 || k.places() != 0 || k.waiting() != 2 {
			t.Fatalf("%d places, %d requests", k.places(), k.waiting())
		}
		k.listen(25 * time.Second)
		if k.asks(a) != 0 {
			t.Error("it is asked again at once")
		}
		k.pass(6 * time.Minute)
	}
	if got := strings.Count(lines.String(), "does not answer"); got != 1 {
		t.Errorf("%d lines of the log:\n%s", got, lines.String())
	}
	records.fails = nil
	k.beat()
	if k.asks(a) != 2 || len(records.tasks) != 2 || k.places() != 2 {
		t.Fatalf("%d tasks, %d places", len(records.tasks), k.places())
	}
	k.listen(4 * time.Minute)
	if k.asks(a) != 2 {
		t.Error("a task is given up early")
	}
	k.listen(2 * time.Minute)
	if k.asks(a) != 0 || k.waiting() != 0 {
		t.Errorf("%d requests without an end are left", k.waiting())
	}
}

// TestAShutGateIsNotAsked checks that the request of a node whose gate is shut waits until it is open: its task would
// expire in the queue.
func TestAShutGateIsNotAsked(t *testing.T) {
	k := newKit(t)
	n := k.requested(1)[0]
	a := k.asker(&fakeRecords{})
	n.gate.Admitted = false
	k.put(n.gate)
	k.listen(10 * time.Second)
	k.round()
	if k.asks(a) != 0 || k.waiting() != 1 {
		t.Error("a node whose gate is shut is asked")
	}
	n.gate.Admitted = true
	k.put(n.gate)
	if k.asks(a) != 1 {
		t.Error("a node whose gate is open again is not asked")
	}
}

// TestAQuestionEndsWithItsNode checks that requests of nodes that are not active any more go, whether they were made or
// not, and that lifecycle is not asked about them again.
func TestAQuestionEndsWithItsNode(t *testing.T) {
	k := newKit(t)
	nodes := k.requested(17)
	a := k.asker(&fakeRecords{})
	if k.asks(a) != 16 {
		t.Fatal("16 have no place")
	}
	for _, n := range nodes {
		k.enter(n, fencedState, "")
	}
	k.listen(5 * time.Second)
	if k.asks(a) != 0 || k.waiting() != 0 {
		t.Errorf("%d requests of nodes that are fenced", k.waiting())
	}
}

// TestOneAnswerThatCannotBeKeptStopsNoOther checks that what is kept of one node does not depend on another.
func TestOneAnswerThatCannotBeKeptStopsNoOther(t *testing.T) {
	k := newKit(t)
	nodes := k.requested(3)
	for _, sql := range []string{
		`CREATE FUNCTION recovery.fails() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'it fails'; END $$`,
		`CREATE TRIGGER fails BEFORE INSERT ON recovery.evidence FOR EACH ROW
			WHEN (NEW.source = 'host' AND NEW.node_id = '` + nodes[1].id() + `') EXECUTE FUNCTION recovery.fails()`,
	} {
		_, err := k.db.OwnerPool().Exec(k.ctx, sql)
		k.must(err)
	}
	records := &fakeRecords{}
	a := k.asker(records)
	k.asks(a)
	records.end(succeededTask, k.diagnostic(badTLS, staleAfter))
	k.listen(time.Second)
	if _, err := a.Once(k.ctx); err == nil || !strings.Contains(err.Error(), nodes[1].id()) {
		t.Errorf("the error is %v", err)
	}
	for i, n := range nodes {
		if kept := k.hostEvidence(n) != ""; kept != (i != 1) {
			t.Errorf("kept of node %d: %t", i, kept)
		}
	}
	if k.waiting() != 1 {
		t.Errorf("%d requests are left", k.waiting())
	}
}

// TestALockedQuestionIsLeftAlone checks that a round does not wait for a request that another transaction has locked.
func TestALockedQuestionIsLeftAlone(t *testing.T) {
	k := newKit(t)
	nodes := k.requested(3)
	a := k.asker(&fakeRecords{})
	k.must(pg.InTx(k.ctx, k.db.OwnerPool(), func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `SELECT FROM recovery.record_request WHERE node_id = $1 FOR UPDATE`, nodes[1].id())
		k.must(err)
		short, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		if got, err := a.Once(short); got != 2 || err != nil {
			t.Errorf("%d are asked: %v", got, err)
		}
		return nil
	}))
	if k.asks(a) != 1 {
		t.Error("it is not asked when it is free")
	}
}

// TestWaitingQuestionsAreBounded checks that more requests than may wait are not written, that those with the oldest
// reasons are, and that a later verdict replaces a request although there is no room.
func TestWaitingQuestionsAreBounded(t *testing.T) {
	k := newKit(t)
	var list []ask.Request
	var nodeIDs []string
	for i := range 300 {
		id := fmt.Sprintf("01a20000-0000-7000-8000-%012d", i)
		nodeIDs = append(nodeIDs, id)
		list = append(list, ask.Request{NodeID: id, Began: 1, Since: k.now().Add(-time.Duration(i) * time.Second)})
	}
	_, err := k.db.OwnerPool().Exec(k.ctx, `INSERT INTO recovery.judgement (node_id, identity_state, generation,
		session_version) SELECT n.node_id, $2, 0, 0 FROM unnest($1::uuid[]) AS n (node_id)`, nodeIDs, collect.ActiveState)
	k.must(err)
	want := func(list ...ask.Request) {
		t.Helper()
		k.must(pg.InTx(k.ctx, k.db.Pool(pg.RoleRecovery), func(ctx context.Context, tx pgx.Tx) error {
			return ask.Want(ctx, tx, list)
		}))
	}
	want(list...)
	if got := k.waiting(); got != 256 {
		t.Errorf("%d requests wait", got)
	}
	oldest := nodeIDs[300-256:]
	got := k.count(`SELECT count(*) FROM recovery.record_request WHERE node_id = ANY ($1::uuid[])`, oldest)
	if got != 256 {
		t.Errorf("%d of them are of the oldest reasons", got)
	}
	later := list[299]
	later.Began = 2
	want(list[0], later)
	if got := k.count(`SELECT count(*) FROM recovery.record_request WHERE began = 2`); got != 1 || k.waiting() != 256 {
		t.Errorf("%d requests are replaced, %d wait", got, k.waiting())
	}
}
