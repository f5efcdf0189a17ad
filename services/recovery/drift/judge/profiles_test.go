package judge_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/testkit"
)

const (
	profileDrift = commonv1.DriftReason_DRIFT_REASON_ENDPOINT_PROFILE_DRIFT

	announcedPhase = recoveryv1.ProfilePhase_PROFILE_PHASE_ANNOUNCED
	activePhase    = recoveryv1.ProfilePhase_PROFILE_PHASE_ACTIVE
	retiringPhase  = recoveryv1.ProfilePhase_PROFILE_PHASE_RETIRING
	retiredPhase   = recoveryv1.ProfilePhase_PROFILE_PHASE_RETIRED
)

// profiles writes the versions of a profile as they are to be, by their fingerprints, and has the judge keep and judge
// what follows.
func (k *kit) profiles(number int64, fingerprint string, phase recoveryv1.ProfilePhase) {
	k.t.Helper()
	_, err := k.db.OwnerPool().Exec(k.ctx, `INSERT INTO recovery.profile (profile_id, name, number, fingerprint, api_url,
			recovery_url, terminal_url, ca_bundle, recovery_ca_bundle, phase, phase_by, phase_reason)
		VALUES ($1, 'site', $2, $3, '', '', '', '', '', $4, 'test', '')
		ON CONFLICT (fingerprint) DO UPDATE SET phase = EXCLUDED.phase, phase_at = mesh.clock()`,
		ids.New(), number, fingerprint, names.Of(phase))
	k.must(err)
	k.put(&recoveryv1.ProfileVersion{
		Profile: &commonv1.Profile{Name: "site", Version: number, Fingerprint: fingerprint}, Phase: phase,
	})
	k.round()
}

// TestAProfileIsJudgedFromTheRows follows a node's profile through the phases of its version: it drifts once that is
// retired, and no more once it is valid again, or the node reports another one.
func TestAProfileIsJudgedFromTheRows(t *testing.T) {
	k := newKit(t)
	n, other := k.reporting(), k.reporting()
	report := func(fingerprint string) {
		t.Helper()
		n.session.Profile = &commonv1.ProfileFacts{Name: "site", Fingerprint: fingerprint}
		k.report(n)
	}
	report("one") // no replica has taken its configuration yet
	k.wantReasons(n.id())
	k.profiles(1, "one", activePhase)
	k.profiles(2, "two", announcedPhase)
	k.profiles(1, "one", retiringPhase)
	k.profiles(2, "two", activePhase)
	k.wantReasons(n.id())
	k.profiles(1, "one", retiredPhase)
	v := k.wantReasons(n.id(), profileDrift)
	if v.GetUserState() != operator || !strings.Contains(used(v, profileDrift), "version 1 of profile site") {
		t.Errorf("the verdict is %v", v)
	}
	k.profiles(1, "one", announcedPhase)
	k.wantReasons(n.id(), profileDrift, unspecified)
	k.profiles(1, "one", retiredPhase)
	report("two") // it has taken the offer
	k.wantReasons(n.id(), profileDrift, unspecified, profileDrift, unspecified)
	report("forged\n" + strings.Repeat("x", 1000))
	v = k.wantReasons(n.id(), profileDrift, unspecified, profileDrift, unspecified, profileDrift)
	if detail := used(v, profileDrift); !strings.Contains(detail, "does not know") || len(detail) > 100 {
		t.Errorf("the detail is %q", detail)
	}
	k.wantReasons(other.id())
	// The last report of a disconnected node still counts: its endpoints are not valid.
	report("one")
	k.lose(n)
	k.round()
	if rows := k.count(`SELECT count(*) FROM recovery.node_profile`); rows != 1 {
		t.Errorf("%d profiles of nodes", rows)
	}
	list := k.verdicts(n.id())
	if got := list[len(list)-1].GetReason(); got != profileDrift {
		t.Errorf("the last verdict is %s", names.Of(got))
	}
}

// TestARetiringVersionJudgesNoNode: a fleet whose version is retiring is not judged for it, since the version is valid
// as it was before.
func TestARetiringVersionJudgesNoNode(t *testing.T) {
	k := newKit(t)
	k.profiles(1, "one", activePhase)
	n := k.reporting()
	n.session.Profile = &commonv1.ProfileFacts{Fingerprint: "one"}
	k.report(n)
	for _, phase := range []recoveryv1.ProfilePhase{retiringPhase, activePhase, announcedPhase} {
		k.put(&recoveryv1.ProfileVersion{
			Profile: &commonv1.Profile{Name: "site", Version: 1, Fingerprint: "one"}, Phase: phase,
		})
		out, err := k.judge.RunOnce(k.ctx)
		k.must(err)
		if out.Judged != 0 {
			t.Errorf("%d nodes were judged as a version is %s", out.Judged, names.Of(phase))
		}
	}
}

// TestARetiredVersionMakesItsNodesDueInPages: however many nodes report a version, its retirement makes a page of them
// due in a transaction, and in the end each is judged.
func TestARetiredVersionMakesItsNodesDueInPages(t *testing.T) {
	k := newKit(t)
	n := k.reporting()
	k.profiles(1, "one", activePhase)
	const nodes, page = 1250, 500
	_, err := k.db.OwnerPool().Exec(k.ctx, `INSERT INTO recovery.judgement AS j
		SELECT (jsonb_populate_record(o, jsonb_build_object('node_id', gen_random_uuid(), 'due_at', NULL, 'session_id', NULL,
			'replica_id', NULL, 'silent_since', NULL, 'probe_due', NULL))).*
		FROM recovery.judgement o, generate_series(1, $2) WHERE o.node_id = $1`, n.id(), nodes)
	k.must(err)
	_, err = k.db.OwnerPool().Exec(k.ctx, `INSERT INTO recovery.node_profile (node_id, name, fingerprint, reported_at)
		SELECT j.node_id, 'site', 'one', mesh.clock() FROM recovery.judgement j WHERE j.node_id <> $1`, n.id())
	k.must(err)
	retire := func(phase recoveryv1.ProfilePhase) {
		t.Helper()
		_, err := k.db.OwnerPool().Exec(k.ctx, `UPDATE recovery.profile SET phase = $1 WHERE fingerprint = 'one'`,
			names.Of(phase))
		k.must(err)
		k.put(&recoveryv1.ProfileVersion{
			Profile: &commonv1.Profile{Name: "site", Version: 1, Fingerprint: "one"}, Phase: phase,
		})
		for more := true; more; {
			if due := k.count(`SELECT count(*) FROM recovery.judgement WHERE due_at IS NOT NULL`); due > page {
				t.Fatalf("%d nodes became due at once", due)
			}
			out, err := k.judge.RunOnce(k.ctx)
			k.must(err)
			more = out.More
		}
	}
	drifting := func() int {
		return k.count(`SELECT count(*) FROM recovery.evidence WHERE part = 'endpoint/profile'
			AND reason = 'endpoint_profile_drift'`)
	}
	k.profiles(2, "two", announcedPhase)
	k.profiles(1, "one", retiringPhase)
	k.profiles(2, "two", activePhase)
	retire(retiredPhase)
	if got := drifting(); got != nodes {
		t.Errorf("%d of %d nodes are judged", got, nodes)
	}
	retire(announcedPhase)
	if got := drifting(); got != 0 {
		t.Errorf("%d nodes drift though the version is valid again", got)
	}
	if left := k.count(`SELECT count(*) FROM recovery.profile_due`); left != 0 {
		t.Errorf("%d versions are left", left)
	}
}

// Scenario: two replicas come to make the nodes of a retired version due at once, and one of them waits for a node that
// another transaction has locked. The other one leaves the page to it, and goes on with its own work.
func TestOneReplicaMakesAPageOfNodesDue(t *testing.T) {
	k := newKit(t)
	n := k.reporting()
	k.profiles(1, "one", activePhase)
	n.session.Profile = &commonv1.ProfileFacts{Fingerprint: "one"}
	k.report(n)
	k.profiles(2, "two", announcedPhase)
	k.profiles(1, "one", retiringPhase)
	k.profiles(2, "two", activePhase)
	_, err := k.db.OwnerPool().Exec(k.ctx, `UPDATE recovery.profile SET phase = 'retired' WHERE fingerprint = 'one'`)
	k.must(err)
	k.put(&recoveryv1.ProfileVersion{
		Profile: &commonv1.Profile{Name: "site", Version: 1, Fingerprint: "one"}, Phase: retiredPhase,
	})
	tx, err := k.db.OwnerPool().Begin(k.ctx)
	k.must(err)
	defer func() { _ = tx.Rollback(k.ctx) }()
	_, err = tx.Exec(k.ctx, `SELECT FROM recovery.judgement WHERE node_id = $1 FOR UPDATE`, n.id())
	k.must(err)
	first := make(chan error, 1)
	go func() {
		_, err := k.judge.RunOnce(k.ctx)
		first <- err
	}()
	testkit.Eventually(t, testkit.Patience, func() error {
		if k.count(`SELECT count(*) FROM pg_locks l JOIN pg_stat_activity a USING (pid)
				WHERE NOT l.granted AND a.datname = current_database()`) == 0 {
			return errors.New("the first replica does not wait for the node")
		}
		return nil
	})
	ctx, cancel := context.WithTimeout(k.ctx, testkit.Patience/2)
	defer cancel()
	out, err := k.another().RunOnce(ctx)
	if err != nil || out.More || out.Next > time.Second {
		t.Errorf("the other replica: %+v, %v", out, err)
	}
	k.must(tx.Rollback(k.ctx))
	k.must(<-first)
	k.round()
	if left := k.count(`SELECT count(*) FROM recovery.profile_due`); left != 0 {
		t.Errorf("%d versions are left", left)
	}
	if list := k.verdicts(n.id()); len(list) == 0 || list[len(list)-1].GetReason() != profileDrift {
		t.Errorf("the verdicts are %v", list)
	}
}
