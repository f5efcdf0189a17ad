package operation

import (
	"testing"
	"time"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
)

// Scenario: each change of an instance commits at the second try only: its event goes to the server with the commit,
// which is refused as a deadlock is. The second try compares the row with the state before the first, so that no step
// needs another attempt, and the row of an instance whose claim is released is ended.
func TestAChangeOfAnInstanceRunsAgainFromWhereItBegan(t *testing.T) {
	t.Parallel()
	p := newCluster(t, clusterConfig{seats: 1, lease: time.Hour})
	for _, sql := range []string{
		`CREATE SEQUENCE mesh.changes_of_instances`,
		`CREATE FUNCTION mesh.refuse_once() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
		BEGIN
			IF NEW.kind = 'instance.changed' AND nextval('mesh.changes_of_instances') % 2 = 1 THEN
				RAISE EXCEPTION 'a test refuses the first try' USING ERRCODE = 'deadlock_detected';
			END IF;
			RETURN NEW;
		END $$`,
		`CREATE TRIGGER refuse_once BEFORE INSERT ON events.event FOR EACH ROW EXECUTE FUNCTION mesh.refuse_once()`,
	} {
		if _, err := p.db.OwnerPool().Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	id := p.create(p.tenant(), "demo", byProcess)
	if _, err := p.seats[0].ask(t.Context(), kDecommission, id); err != nil {
		t.Fatal(err)
	}
	p.rests(id, "decommissioned")
	var states []string
	for _, e := range testkit.Events(t, p.db.Pool(pg.RoleLifecycle), `kind = 'instance.changed' AND workspace_id = $1`,
		id) {
		states = append(states, e.Text("state"))
	}
	if n := p.count(`SELECT last_value FROM mesh.changes_of_instances`); n != 2*len(states) || len(states) < 5 {
		t.Errorf("%d tries made the states %q; want two for each", n, states)
	}
	if n := p.count(`SELECT count(*) FROM lifecycle.instance WHERE workspace_id = $1 AND state <> 'ended'`, id); n != 0 {
		t.Errorf("the workspace is decommissioned, and an instance of it is not ended: %q", states)
	}
	if n := p.count(`SELECT count(*) FROM lifecycle.saga_step WHERE workspace_id = $1 AND error <> ''`, id); n != 0 {
		t.Errorf("%d attempts failed", n)
	}
}
