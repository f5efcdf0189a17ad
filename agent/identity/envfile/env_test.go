package envfile_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuaas/mesh/agent/identity/envfile"
)

func TestParse(t *testing.T) {
	if _, err := envfile.Parse([]byte(" A = b c \r\n")); err == nil {
		t.Fatal("a name with a space was accepted")
	}
	env, err := envfile.Parse([]byte("# comment\n\nexport " +
		"GPUAAS_API_URL='https://api:7001'\nGPUAAS_ENROLLMENT_TOKEN=\"gbt_x\"\r\nOTHER=b c\nGPUAAS_NODE_NAME=\n"))
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{
		"GPUAAS_API_URL": "https://api:7001", "GPUAAS_ENROLLMENT_TOKEN": "gbt_x",
		"OTHER": "b c", "GPUAAS_NODE_NAME": "",
	} {
		if got := env.Get(name); got != want {
			t.Errorf("%s = %q, want %q", name, got, want)
		}
	}
	if diff := cmp.Diff([]string{"OTHER"}, env.Unknown()); diff != "" {
		t.Error(diff)
	}
}

func TestParseReportsAllProblemsWithoutValues(t *testing.T) {
	_, err := envfile.Parse([]byte("canary\nA='canary\nb=canary\nA=canary'x\nC=1\nC=2\nD=\x01canary\n"))
	if err == nil {
		t.Fatal("accepted")
	}
	text := err.Error()
	for _, line := range []string{"line 1", "line 2", "line 3", "line 4", "line 6", "line 7"} {
		if !strings.Contains(text, line) {
			t.Errorf("%s is not reported in %q", line, text)
		}
	}
	if strings.Contains(text, "canary") {
		t.Errorf("a value is in the error: %q", text)
	}
}

func TestHostPort(t *testing.T) {
	tests := []struct{ in, want string }{
		{"api:7001", "api:7001"},
		{"https://api", "api:443"},
		{"https://api:1/", "api:1"},
		{"api", "api:443"},
		{"127.0.0.1:5", "127.0.0.1:5"},
		{"[::1]:5", "[::1]:5"},
		{"https://[::1]", "[::1]:443"},
		{"http://api", ""},
		{"https://u@api", ""},
		{"https://api/x", ""},
		{"https://api?q", ""},
		{"", ""},
		{"api:port", ""},
		{"api:99999", ""},
		{"a b:1", ""},
		{":1", ""},
	}
	for _, tt := range tests {
		got, err := envfile.HostPort(tt.in)
		if got != tt.want || (err != nil) != (tt.want == "") {
			t.Errorf("HostPort(%q) = %q, %v; want %q", tt.in, got, err, tt.want)
		}
	}
}

func TestValidateEnvReportsEverything(t *testing.T) {
	env, err := envfile.Parse(
		[]byte("GPUAAS_TERMINAL_API_URL=http://x\nGPUAAS_RECOVERY_API_URL=ftp://y\nGPUAAS_API_URL=a b\n"),
	)
	if err != nil {
		t.Fatal(err)
	}
	verr := env.Validate()
	if verr == nil || strings.Count(verr.Error(), "\n") != 2 {
		t.Errorf("Validate = %v", verr)
	}
	if (envfile.Env{}).Validate() == nil {
		t.Error("an empty file is valid")
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte("A=b\n"))
	f.Add([]byte("export A='b'\n#x\nB=\"c d\"\r\n"))
	f.Add([]byte("A=' spaced '\nB==\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		env, err := envfile.Parse(data)
		if err != nil {
			return
		}
		again, err := envfile.Parse(env.Render())
		if err != nil {
			t.Fatalf("what was read cannot be read again: %v", err)
		}
		if string(again.Render()) != string(env.Render()) {
			t.Fatalf("%q became %q", env.Render(), again.Render())
		}
		for _, name := range env.Unknown() {
			if !envfile.Clean(env.Get(name)) {
				t.Fatalf("%s=%q was read but is not clean", name, env.Get(name))
			}
			if env.Get(name) != again.Get(name) {
				t.Fatalf("%s changed", name)
			}
		}
	})
}

// TestAnOperatorsTokenMayStandBesideARecoveryToken checks that both tokens are read in either order, and that the file
// is written again with both.
func TestAnOperatorsTokenMayStandBesideARecoveryToken(t *testing.T) {
	for _, text := range []string{
		"GPUAAS_ENROLLMENT_TOKEN=grt_a\nGPUAAS_API_URL=a:1\nGPUAAS_ENROLLMENT_TOKEN=gbt_b\n",
		"GPUAAS_ENROLLMENT_TOKEN='gbt_b'\nGPUAAS_API_URL=a:1\nexport GPUAAS_ENROLLMENT_TOKEN=grt_a\n",
	} {
		env, err := envfile.Parse([]byte(text))
		if err != nil || env.Get(envfile.Token) != "gbt_b" {
			t.Errorf("%q: token %q, %v", text, env.Get(envfile.Token), err)
		}
		again, err := envfile.Parse(env.Render())
		if err != nil || !cmp.Equal(again.Render(), env.Render()) ||
			!strings.Contains(string(again.Render()), "='grt_a'\n") {
			t.Errorf("%q: written again as %q, %v", text, again.Render(), err)
		}
		if one := string(env.With(envfile.Token, "grt_c").Render()); strings.Count(one, "TOKEN") != 1 {
			t.Errorf("with another token: %q", one)
		}
	}
	for _, text := range []string{
		"GPUAAS_ENROLLMENT_TOKEN=gbt_a\nGPUAAS_ENROLLMENT_TOKEN=gbt_b\n",
		"GPUAAS_ENROLLMENT_TOKEN=grt_a\nGPUAAS_ENROLLMENT_TOKEN=grt_b\n",
		"GPUAAS_ENROLLMENT_TOKEN=grt_a\nGPUAAS_ENROLLMENT_TOKEN=gbt_b\nGPUAAS_ENROLLMENT_TOKEN=grt_c\n",
	} {
		if _, err := envfile.Parse([]byte(text)); err == nil {
			t.Errorf("%q was taken", text)
		}
	}
}
