package keys_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/keys"
)

func TestMain(m *testing.M) { testkit.Main(m) }

type kit struct {
	t  *testing.T
	db *testkit.Database
}

func newKit(t *testing.T) kit {
	t.Helper()
	testkit.IO(t)
	return kit{t: t, db: testkit.DB(t)}
}

func (k kit) do(fn func(ctx context.Context, tx pgx.Tx) (bool, error)) {
	k.t.Helper()
	err := pg.InTx(testkit.Context(k.t), k.db.Pool(pg.RoleRecovery), func(ctx context.Context, tx pgx.Tx) error {
		_, err := fn(ctx, tx)
		return err
	})
	if err != nil {
		k.t.Fatal(err)
	}
}

func (k kit) unknown(replica string, seen ...keys.Unknown) {
	k.t.Helper()
	k.do(func(ctx context.Context, tx pgx.Tx) (bool, error) { return keys.ReportUnknown(ctx, tx, replica, seen) })
}

func (k kit) want(what, sql, want string) {
	k.t.Helper()
	var got string
	if err := k.db.Pool(pg.RoleRecovery).QueryRow(testkit.Context(k.t), sql).Scan(&got); err != nil {
		k.t.Fatal(err)
	}
	if got != want {
		k.t.Errorf("%s: %s, want %s", what, got, want)
	}
}

// Scenario: first one replica lacks a key, and then another one. The incident's next action names the replica that its
// summary names.
func TestTheNextActionIsOfTheReplicaInTheSummary(t *testing.T) {
	k := newKit(t)
	seen := keys.Unknown{KeyID: "k1", NodeID: ids.New()}
	k.unknown("first", seen)
	testkit.SetClockOffset(k.db, 2*time.Minute)
	k.unknown("second", seen)
	k.want("the incident", `SELECT (summary LIKE '%replica second %')::text || ' ' ||
		(next_action LIKE '%replica second %')::text
		|| ' ' || count FROM recovery.incident WHERE closed_at IS NULL`, "true true 2")
}

// Scenario: a node sends join states of made-up keys. It opens eight incidents at most, and those of replicas that
// cannot use a key are opened beside them.
func TestMadeUpKeysHideNoReplica(t *testing.T) {
	k := newKit(t)
	node := ids.New()
	for n := range 12 {
		k.unknown("one", keys.Unknown{KeyID: fmt.Sprintf("made-up-%02d", n), NodeID: node})
	}
	const open = `SELECT count(*) || ' ' || count(*) FILTER (WHERE key LIKE 'recovery/%') FROM recovery.incident
		WHERE closed_at IS NULL`
	k.want("of the node", open, "8 0")
	report := keys.Report{Key: "recovery/two", Summary: "replica two cannot use a key", NextAction: "put the file right"}
	k.do(func(ctx context.Context, tx pgx.Tx) (bool, error) { return keys.Raise(ctx, tx, report) })
	k.want("and of a replica", open, "9 1")
	k.unknown("one", keys.Unknown{KeyID: "made-up-99", NodeID: node})
	k.want("after one more key", open, "9 1")
	// Without evidence the incidents end, and not before.
	k.do(func(ctx context.Context, tx pgx.Tx) (bool, error) { return keys.Close(ctx, tx, nil) })
	k.want("at once", open, "9 1")
	testkit.SetClockOffset(k.db, 11*time.Minute)
	k.do(func(ctx context.Context, tx pgx.Tx) (bool, error) { return keys.Close(ctx, tx, nil) })
	k.want("eleven minutes later", open, "0 0")
}

// Scenario: a node opens as many incidents of made-up keys as it may. A replica lacks two keys that are in the set, one
// of them retired: each has its incident, and leaves the made-up ones no more room than before.
func TestMadeUpKeysHideNoKeyOfTheSet(t *testing.T) {
	k := newKit(t)
	liar, node := ids.New(), ids.New()
	for key, state := range map[string]string{"signs": "signing", "signed": "retired"} {
		if _, err := k.db.OwnerPool().Exec(testkit.Context(t), `INSERT INTO mesh.signing_key
			(kind, key_id, public_key, state, file, made_by, made_at, state_at)
			VALUES ('join_state', $1, decode(repeat('00', 32), 'hex'), $2, $1, 'one', mesh.clock(), mesh.clock())`,
			key, state); err != nil {
			t.Fatal(err)
		}
	}
	made := 0
	lie := func() {
		for range 10 {
			made++
			k.unknown("two", keys.Unknown{KeyID: fmt.Sprintf("made-up-%02d", made), NodeID: liar})
		}
	}
	const open = `SELECT count(*) || ' ' || coalesce(string_agg(key, ' '
		ORDER BY key) FILTER (WHERE key NOT LIKE 'made-up-%'), '')
		FROM recovery.incident WHERE closed_at IS NULL`
	k.unknown("two", keys.Unknown{KeyID: "signs", NodeID: node})
	lie()
	k.want("one of the set, then made-up ones", open, "9 signs")
	k.unknown("two", keys.Unknown{KeyID: "signed", NodeID: node}, keys.Unknown{KeyID: "made-up-00", NodeID: liar})
	lie()
	k.want("then another one of the set", open, "10 signed signs")
}
