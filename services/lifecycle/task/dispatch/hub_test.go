package dispatch_test

import (
	"slices"
	"testing"

	"github.com/gpuaas/mesh/services/lifecycle/task/dispatch"
)

// failsFrom has mesh.clock fail from a number of calls on, counted from now; zero: never.
func (k *kit) failsFrom(call int) {
	k.t.Helper()
	for _, sql := range []string{
		`CREATE SEQUENCE IF NOT EXISTS mesh.clock_calls`, `ALTER SEQUENCE mesh.clock_calls RESTART`,
		`CREATE TABLE IF NOT EXISTS mesh.clock_fails (from_call bigint)`, `TRUNCATE mesh.clock_fails`,
		`CREATE OR REPLACE FUNCTION mesh.clock() RETURNS timestamptz LANGUAGE plpgsql STABLE SECURITY DEFINER AS $$
		BEGIN
			IF nextval('mesh.clock_calls') >= (SELECT from_call FROM mesh.clock_fails) THEN
				RAISE EXCEPTION 'the clock fails';
			END IF;
			RETURN clock_timestamp();
		END $$`,
	} {
		if _, err := k.db.OwnerPool().Exec(k.t.Context(), sql); err != nil {
			k.t.Fatal(err)
		}
	}
	if call == 0 {
		return
	}
	if _, err := k.db.OwnerPool().Exec(k.t.Context(), `INSERT INTO mesh.clock_fails VALUES ($1)`, call); err != nil {
		k.t.Fatal(err)
	}
}

// cancelled queues a task of a node, leases it and has it cancelled.
func (k *kit) cancelled(n *node) string {
	k.t.Helper()
	id := k.enqueue(n).TaskID
	k.lease(n)
	if _, err := k.db.OwnerPool().Exec(k.t.Context(),
		`UPDATE lifecycle.task SET cancel_requested_at = clock_timestamp(), cancel_reason = 'no more'
		WHERE task_id = $1`, id); err != nil {
		k.t.Fatal(err)
	}
	return id
}

// TestAFailedListGoesOnWhereItFailed checks that nodes at the end of a list get their hints though no list from the
// beginning comes so far.
func TestAFailedListGoesOnWhereItFailed(t *testing.T) {
	k := newKit(t)
	var want []string
	for range 3 {
		n := k.node()
		k.enqueue(n)
		want = append(want, n.id)
	}
	slices.Sort(want)
	list := k.hub.List(1)
	var got []string
	for range 3 { // each fails after one page
		k.failsFrom(2)
		nodes, _ := list.Next(t.Context())
		got = append(got, nodes...)
	}
	if !slices.Equal(got, want) {
		t.Errorf("listed %v of %v", got, want)
	}
	k.failsFrom(0)
	list.Next(t.Context())
	if again, _ := list.Next(t.Context()); len(again) != 3 {
		t.Errorf("a list that did not fail has %v of %v", again, want)
	}
}

// TestAFirstPageThatFailsIsTriedInPieces checks that a list which cannot read its first page reads shorter ones, until
// it has come to an end.
func TestAFirstPageThatFailsIsTriedInPieces(t *testing.T) {
	k := newKit(t)
	for range 3 {
		k.enqueue(k.node())
	}
	list := k.hub.List(4)
	for range 2 {
		k.failsFrom(1)
		list.Next(t.Context())
	}
	for n := range 3 {
		k.failsFrom(2) // after one page
		if nodes, _ := list.Next(t.Context()); len(nodes) != 1 {
			t.Errorf("the page %d has %v, want one node", n, nodes)
		}
	}
	k.failsFrom(0)
	list.Next(t.Context())
	k.failsFrom(2)
	if nodes, _ := list.Next(t.Context()); len(nodes) != 3 {
		t.Errorf("after a whole list a page has %v, want all three nodes", nodes)
	}
}

// TestCancelsAreHintedThoughNodesAreNotListed checks that cancels are sent though the list of nodes fails.
func TestCancelsAreHintedThoughNodesAreNotListed(t *testing.T) {
	k := newKit(t)
	n := k.node()
	id := k.cancelled(n)
	k.enqueue(n)
	k.failsFrom(1)
	nodes, cancels := k.hub.List(1000).Next(t.Context())
	if len(nodes) != 0 || !slices.Equal(cancels, []string{id}) {
		t.Errorf("listed %v, cancels %v, want that of %s", nodes, cancels, id)
	}
}

// TestCancelsOfNodesThatAreAwayDelayNoOthers checks that a list of cancels has room for those that can be answered,
// however many wait for nodes that are away.
func TestCancelsOfNodesThatAreAwayDelayNoOthers(t *testing.T) {
	k := newKit(t)
	away, n := k.node(), k.node()
	if _, err := k.db.OwnerPool().Exec(t.Context(),
		`UPDATE lifecycle.node_gate SET session_open = false WHERE node_id = $1`, away.id); err != nil {
		t.Fatal(err)
	}
	if _, err := k.db.OwnerPool().Exec(t.Context(), `
		INSERT INTO lifecycle.task (task_id, type, node_id, state, idem_key, payload, expires_at, cancel_requested_at,
			attempt)
		SELECT ('00000000-0000-7000-8000-' || lpad(n::text, 12, '0'))::uuid, 'probe.noop', $1, 'running', n::text, '',
			clock_timestamp() + interval '1 hour', clock_timestamp(), 1
		FROM generate_series(1, $2) n`, away.id, dispatch.SweepMost); err != nil {
		t.Fatal(err)
	}
	id := k.cancelled(n)
	if _, cancels := k.hub.List(1000).Next(t.Context()); !slices.Equal(cancels, []string{id}) {
		t.Errorf("%d cancels are told, want that of %s alone", len(cancels), id)
	}
}
