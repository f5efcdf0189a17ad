package fault_test

import (
	"strings"
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

// TestNoSuchNamesWhatWasAskedFor checks that the refusal repeats what the request named: in quotes, with control
// characters escaped, and cut between characters to a bounded length.
func TestNoSuchNamesWhatWasAskedFor(t *testing.T) {
	for asked, want := range map[string]string{
		"":                       "there is no such node",
		"n9":                     `there is no node "n9"`,
		"n9\n\x1b[31mok":         `there is no node "n9\n\x1b[31mok"`,
		`a"b`:                    `there is no node "a\"b"`,
		strings.Repeat("é", 80):  `there is no node "` + strings.Repeat("é", 80) + `"`,
		strings.Repeat("é", 900): `there is no node "` + strings.Repeat("é", 80) + `…"`,
		"\xff":                   `there is no node "\xff"`,
	} {
		got := fault.NoSuch("node", asked, fault.Remedy("look"))
		if got.Public != want || got.Reason != commonv1.Reason_REASON_NOT_FOUND || got.Remedy != "look" {
			t.Errorf("%q: %+v, want %q", asked, got, want)
		}
	}
}

// TestNoSuchNamesTheListOfWhatThereIs checks that the way on is the command that lists the objects of the kind, unless
// the refusal has a remedy of its own, or the kind has no list.
func TestNoSuchNamesTheListOfWhatThereIs(t *testing.T) {
	for what, want := range map[string]string{
		"node": "`gpuaas nodes list`", "workspace": "`gpuaas workspaces list`", "run": "`gpuaas workspaces timeline WS`",
		"operation": fault.RowOf(commonv1.Reason_REASON_NOT_FOUND).Remedy,
	} {
		if got := fault.NoSuch(what, "x"); !strings.Contains(got.Remedy, want) {
			t.Errorf("%s: %q, want %q", what, got.Remedy, want)
		}
	}
}
