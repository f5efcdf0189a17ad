package lifecycle

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/secretenv"
)

// TestWorkloadSecretKeysAreNeeded: a configuration without the key file is refused by `config check`, and a file that is no key set at the start.
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
		if good := name == "good"; good != (err == nil) || err != nil && !strings.Contains(err.Error(), "workload_secrets_keys_file") {
			t.Errorf("%s: %v", name, err)
		}
	}
}
