package process

import (
	"slices"
	"testing"
)

// TestOnlyWhatTheAgentSetIsShown: a tenant's variable is a secret, whatever its name begins with.
func TestOnlyWhatTheAgentSetIsShown(t *testing.T) {
	t.Parallel()
	sp := spec{
		WorkspaceID: "the-workspace", Name: "the-workload", Epoch: 1234, Ports: []port{{Name: "web-ui", Port: 18080}},
		Env: map[string]string{
			"PATH": "/usr/bin", "HOME": "/home/it", "CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2",
			"GPUAAS_WORKSPACE_ID": "the-workspace", "GPUAAS_WORKLOAD": "the-workload", "GPUAAS_EPOCH": "1234", "PORT": "18080",
			"PORT_WEB_UI": "18080", "PORT_API_TOKEN": "token-of-a-port", "PORT_ADMIN": "18081",
			"GPUAAS_API_TOKEN": "token-of-the-platform", "URL": "postgresql://role:pass+word@host/db", "SHORT": "abc",
		},
	}
	want := []string{
		"token-of-the-platform", "18081", "token-of-a-port", "postgresql://role:pass+word@host/db",
		"pass+word", "pass%2Bword",
	}
	if got := secretsOf(sp); !slices.Equal(got, want) {
		t.Errorf("the secrets are %q, want %q", got, want)
	}
	sp.Ports = nil
	if got := secretsOf(sp); !slices.Contains(got, "18080") {
		t.Errorf("the secrets are %q, without PORT, which the tenant has set", got)
	}
}
