package kit

import "testing"

// TestANodeMayGetWellMeanwhile checks that the end of a node's reason is no difference, and that a node which is gone,
// or has another identity, is still one.
func TestANodeMayGetWellMeanwhile(t *testing.T) {
	with := func(node, lasting string, restless bool) world {
		return world{
			nodes: map[string]string{"n1": node + lasting}, restless: map[string]bool{"n1": restless},
			lasting: map[string]string{"n1": lasting},
		}
	}
	ill, well := with("agent_down ", "active a", true), with("", "active a", false)
	for name, test := range map[string]struct {
		before, now world
		changes     int
	}{
		"it gets well":                {ill, well, 0},
		"it becomes ill":              {well, ill, 1},
		"it gets well as another one": {ill, with("", "active b", false), 1},
		"it is gone":                  {ill, world{}, 1},
		"nothing changes":             {ill, ill, 0},
	} {
		if got := test.before.changed(test.now); len(got) != test.changes {
			t.Errorf("%s: %q, want %d", name, got, test.changes)
		}
	}
}
