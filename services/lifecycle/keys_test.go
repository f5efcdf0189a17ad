package lifecycle

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/secretenv"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/spec"
)

// TestWorkloadSecretKeysAreNeeded: a configuration without the key file is refused by `config check`, and a file that
// is no key set at the start.
func TestWorkloadSecretKeysAreNeeded(t *testing.T) {
	if err := Default().Validate(); err == nil || !strings.Contains(err.Error(), "workload_secrets_keys_file is needed") {
		t.Errorf("without a file: %v", err)
	}
	path := filepath.Join(t.TempDir(), "keys")
	for name, text := range map[string]string{"missing": "", "malformed": "no key\n", "good": secretenv.NewKey() + "\n"} {
		if text != "" {
			if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		} else if err := os.RemoveAll(path); err != nil {
			t.Fatal(err)
		}
		_, err := workloadSecrets(Config{WorkloadSecretsKeysFile: config.SecretFile(path)})
		if good := name == "good"; good != (err == nil) || err != nil &&
			!strings.Contains(err.Error(), "workload_secrets_keys_file") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestACheckThatFailsRefusesNoStart: only a key that is known to be missing ends the process; a check that the database
// cancels is repeated.
func TestACheckThatFailsRefusesNoStart(t *testing.T) {
	testkit.IO(t)
	db := testkit.DB(t)
	pool, err := pg.Open(t.Context(),
		pg.Config{URL: db.URL(pg.RoleLifecycle), MaxConns: 2, StatementTimeout: 500 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	keys, err := secretenv.Parse(secretenv.NewKey())
	if err != nil {
		t.Fatal(err)
	}
	const unknown = "0011223344556677"
	if _, err := db.OwnerPool().Exec(t.Context(), `INSERT INTO lifecycle.operation_key (tenant_id, key, digest, run_id)
		VALUES (gen_random_uuid(), 'k', 'create/hmac-sha256.' || $1 || '.00', gen_random_uuid())`, unknown); err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	logger := slog.New(slog.NewTextHandler(&log, nil))
	sealer := &spec.Sealer{DB: pool, Secrets: keys, Committed: func() {}}

	tx, err := db.OwnerPool().Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), `LOCK TABLE lifecycle.operation_key IN ACCESS EXCLUSIVE MODE`); err != nil {
		t.Fatal(err)
	}
	if checked, err := checkKeys(t.Context(), logger, sealer, nil); checked || err != nil {
		t.Errorf("a check that was cancelled: %t, %v", checked, err)
	}
	if !strings.Contains(log.String(), "57014") || !strings.Contains(log.String(), "not checked yet") {
		t.Errorf("the log of a check that was cancelled: %q", log.String())
	}
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}

	patient, err := pg.Open(t.Context(), pg.Config{URL: db.URL(pg.RoleLifecycle), MaxConns: 2})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(patient.Close)
	sealer.DB = patient
	checked, err := checkKeys(t.Context(), logger, sealer, nil)
	if checked || !fault.Has(err, commonv1.Reason_REASON_WORKLOAD_SECRET_KEY_UNKNOWN) {
		t.Fatalf("a key that is missing: %t, %v", checked, err)
	}
	e, _ := fault.As(err)
	if want := "workload_secrets_keys_file has no key " + unknown +
		", which 1 row needs"; strings.Join(e.Unmet, "") != want {
		t.Errorf("unmet: %q, want %q", e.Unmet, want)
	}
	if checked, err := checkKeys(t.Context(), logger, sealer, []string{unknown}); !checked || err != nil {
		t.Errorf("a key that was given up for lost: %t, %v", checked, err)
	}

	// A refusal needs no numbers.
	if _, err := db.OwnerPool().Exec(t.Context(), `REVOKE SELECT ON lifecycle.secret_key_use FROM lifecycle`); err != nil {
		t.Fatal(err)
	}
	_, err = checkKeys(t.Context(), logger, sealer, nil)
	e, _ = fault.As(err)
	if want := "workload_secrets_keys_file has no key " + unknown + ", which rows need"; e == nil ||
		strings.Join(e.Unmet, "") != want {
		t.Errorf("without a count: %v, want %q", err, want)
	}
}
