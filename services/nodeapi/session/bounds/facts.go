package bounds

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
)

// MostGPUs and MostAddresses bound what is kept of a host, and MostFact the text of one fact, in bytes. Recovery
// compares no more of them.
const (
	MostGPUs      = 64
	MostAddresses = 64
	MostFact      = 128
)

// FactsCut counts what was cut of the facts of hosts.
type FactsCut struct {
	GPUs      int // beyond MostGPUs
	Addresses int // beyond MostAddresses
	Texts     int // longer than MostFact
}

// Facts bounds what a host claims of its GPUs, its addresses and its runtime, and returns what it cut: the GPUs with
// the highest indexes, and addresses from the end of their sorted list.
func Facts(facts *commonv1.HostFacts) FactsCut {
	var out FactsCut
	if facts == nil {
		return out
	}
	if n := len(facts.GetGpus()) - MostGPUs; n > 0 {
		out.GPUs = n
		slices.SortStableFunc(facts.GetGpus(), func(a, b *commonv1.Gpu) int {
			return cmp.Compare(a.GetIndex(), b.GetIndex())
		})
		facts.Gpus = facts.GetGpus()[:MostGPUs]
	}
	if len(facts.GetAddresses()) > MostAddresses {
		out.Addresses = cutAddresses(facts)
	}
	text := func(s *string) {
		if len(*s) > MostFact {
			*s = strings.ToValidUTF8((*s)[:MostFact], "")
			out.Texts++
		}
	}
	text(&facts.Kernel)
	text(&facts.ContainerRuntime)
	for _, g := range facts.GetGpus() {
		text(&g.DeviceId)
		text(&g.Model)
		text(&g.DriverVersion)
	}
	return out
}

// cutAddresses sorts the addresses, removes duplicates and texts that are no addresses, and keeps MostAddresses of
// them. It returns how many it cut.
func cutAddresses(facts *commonv1.HostFacts) int {
	all := slices.DeleteFunc(facts.GetAddresses(), func(text string) bool {
		_, err := netip.ParseAddr(text)
		return err != nil
	})
	slices.Sort(all)
	all = slices.Compact(all)
	facts.Addresses = all[:min(len(all), MostAddresses)]
	return len(all) - len(facts.GetAddresses())
}
