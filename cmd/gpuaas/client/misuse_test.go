package client_test

import (
	"strings"
	"testing"
)

// TestAMistakeInSeveralArgumentsIsExplained: the errors about missing, superfluous and contradictory arguments and
// flags name them as the command line has them.
func TestAMistakeInSeveralArgumentsIsExplained(t *testing.T) {
	mesh(t)
	for line, want := range map[string]string{
		"ca repair --reason r":                               "it needs --root",
		"profiles show default 4 --bundle --recovery-bundle": "--bundle and --recovery-bundle exclude each other",
		"explain reason a b":                                 `gpuaas explain reason: unexpected argument "b"`,
		"nodes watch a b":                                    `gpuaas nodes watch: unexpected argument "b"`,
		"events replay --reason r":                           "gpuaas events replay needs CONSUMER",
		"events replay a 1 2 --reason r":                     `gpuaas events replay: unexpected argument "2"`,
		"tokens revoke --reason r":                           "gpuaas tokens revoke needs TOKEN, or --node NODE",
		"tokens extend --profile p --reason r":               "gpuaas tokens extend needs --profile P and --until T",
		"profiles set default --reason r":                    "needs --api A, --recovery URL and --ca-bundle FILE",
		"nodes bundle n1 --reason r --out -":                 "--out -: an archive is written to a file",
		"nodes enroll --name a --out b --valid-for 0s":       "--valid-for: between 1s and 24h",
		"nodes enroll --name a --out b --gpus 65":            "--gpus 65: it is from 0 to 64",
		"workspaces list --state bogus":                      `--state "bogus" is none of provisioning, active`,
	} {
		got := call(t, strings.Fields(line)...).wants(t, 2)
		if !strings.Contains(got.err, want) {
			t.Errorf("%s: %s, want %s", line, got.err, want)
		}
	}
}
