package recovery_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/recovery/v1/recoveryv1connect"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/rpc/calls"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery"
	"github.com/gpuaas/mesh/services/recovery/keys"
)

// second builds another replica on the mesh's database with another directory of join state keys.
func (m *mesh) second(keys string) error {
	m.t.Helper()
	registry, err := obs.NewRegistry()
	if err != nil {
		m.t.Fatal(err)
	}
	cfg := m.cfg
	cfg.JoinStateKeys = keys
	service, err := recovery.New(m.ctx, recovery.Deps{Logger: testkit.Logger(m.t), Registry: registry}, cfg)
	if err == nil {
		service.Close()
	}
	return err
}

// Scenario: a second replica of recovery comes up on another machine, whose directory of keys was not copied. With a
// key of its own each of the two would take what the other signed for unknown.
func TestAReplicaWithADirectoryOfItsOwnDoesNotStart(t *testing.T) {
	m := start(t)
	other := t.TempDir()
	err := m.second(other)
	if err == nil {
		t.Fatal("a replica with an empty directory of its own started beside the first")
	}
	if !strings.Contains(err.Error(), "signing_keys_differ") || !strings.Contains(err.Error(), "join-000001.pem") {
		t.Fatalf("the refusal names no file: %v", err)
	}
	data, err := os.ReadFile(filepath.Join(m.cfg.JoinStateKeys, "join-000001.pem"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(other, "join-000001.pem"), data, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := m.second(other); err != nil {
		t.Fatalf("with the file it was told to copy: %v", err)
	}
}

// Scenario: a person of the role security asks for the next key of join states over the real port, and the replica
// makes it, signs with it, and reports a file that it cannot use.
func TestAPersonRotatesTheKeyOfJoinStates(t *testing.T) {
	m := start(t, func(c *recovery.Config) { c.SweepEvery = time.Hour }) // only the test checks for problems
	console, url := m.client("readmodel")
	people := recoveryv1connect.NewKeyServiceClient(console, url,
		calls.Options(calls.Config{Asserter: m.asserter})...)
	ask := func(dry bool, key string, roles ...string) error {
		_, err := people.RotateKey(m.asPerson(roles...), &recoveryv1.RotateKeyRequest{
			Kind: recoveryv1.KeyKind_KEY_KIND_JOIN_STATE, Reason: "yearly", IdempotencyKey: key, DryRun: dry,
		})
		return err
	}
	if err := ask(false, "r1", "operator"); !fault.Has(err, commonv1.Reason_REASON_PERMISSION_DENIED) {
		t.Fatalf("an operator without the role: %v", err)
	}
	if err := ask(true, "r1", "security"); err != nil {
		t.Fatal(err)
	}
	list := func() *recoveryv1.ListKeysResponse {
		t.Helper()
		answer, err := people.ListKeys(m.asPerson("viewer"), &recoveryv1.ListKeysRequest{})
		if err != nil {
			t.Fatal(err)
		}
		answer.Keys = slices.DeleteFunc(answer.GetKeys(), func(k *recoveryv1.SigningKey) bool {
			return k.GetKind() != recoveryv1.KeyKind_KEY_KIND_JOIN_STATE
		})
		return answer
	}
	if n := len(list().GetKeys()); n != 1 {
		t.Fatalf("%d keys after a dry run", n)
	}
	if err := ask(false, "r1", "security"); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, testkit.Patience, func() error {
		keys := list().GetKeys()
		if len(keys) != 2 || keys[1].GetState() != recoveryv1.KeyState_KEY_STATE_SIGNING || len(keys[1].GetHeldBy()) != 1 {
			return fmt.Errorf("the keys are %v", keys)
		}
		return nil
	})
	if err := ask(false, "r2", "security"); !fault.Has(err, commonv1.Reason_REASON_KEY_ROTATION_UNDER_WAY) {
		t.Fatalf("a second rotation: %v", err)
	}
	file := filepath.Join(m.cfg.JoinStateKeys, list().GetKeys()[1].GetFile())
	if err := os.Chmod(file, 0o640); err != nil { // the mode is the point
		t.Fatal(err)
	}
	testkit.Eventually(t, testkit.Patience, func() error {
		if problems := list().GetProblems(); len(problems) == 0 ||
			!strings.Contains(problems[0].GetProblem(), "mode is 0640") {
			return fmt.Errorf("the problems are %v", problems)
		}
		return nil
	})
	if appended, err := keys.Sweep(m.ctx, m.db.Pool(pg.RoleRecovery)); err != nil || !appended {
		t.Fatalf("no incident: %v, %v", appended, err)
	}
	var summary string
	err := m.db.Pool(pg.RoleRecovery).QueryRow(m.ctx,
		`SELECT summary FROM recovery.incident WHERE kind = 'signing_keys' AND closed_at IS NULL`).Scan(&summary)
	if err != nil || !strings.Contains(summary, filepath.Base(file)) || !strings.Contains(summary, m.service.ReplicaID()) {
		t.Fatalf("the incident is %q, %v", summary, err)
	}
}
