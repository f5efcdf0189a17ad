package main

import (
	"testing"

	"github.com/spf13/pflag"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
)

// TestBenchesHaveTheirOwnDefaults checks that a flag that is not given has the default in its help: several benches
// share an option, each with a default of its own.
func TestBenchesHaveTheirOwnDefaults(t *testing.T) {
	for i := range newBenchCommand(&kit.Program{}).Commands() {
		sub := newBenchCommand(&kit.Program{}).Commands()[i]
		if err := sub.PreRunE(sub, nil); err != nil {
			t.Errorf("%s: %v", sub.CommandPath(), err)
		}
		sub.LocalFlags().VisitAll(func(f *pflag.Flag) {
			if f.Value.String() != f.DefValue {
				t.Errorf("%s --%s is %s where it is not given, and its help says %s", sub.CommandPath(), f.Name, f.Value,
					f.DefValue)
			}
		})
	}
}
