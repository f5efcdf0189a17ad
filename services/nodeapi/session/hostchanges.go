package session

import (
	"hash/maphash"
	"time"

	"google.golang.org/protobuf/proto"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
)

const (
	// addressesPause is the shortest time between two reports of a session that differ in the host's addresses alone.
	addressesPause = time.Minute
	// A session reports hostReports changes of its host at once, and then one in hostPause. For a state directory that
	// has no room, or has it again, it has as many reports beyond these, so that other changes do not delay that one.
	hostReports = 4
	hostPause   = time.Minute
)

var digests = maphash.MakeSeed()

// hostChanges bounds how often the changed facts of a session's host are reported. A change waits while the reports are
// used up, and the newest facts are reported later. A change of the addresses alone, as of an interface that goes up
// and down, also waits until the last such change is addressesPause old. A change that is taken back before it was
// reported is dropped.
type hostChanges struct {
	otherFacts, addresses uint64 // digests of the facts that were reported last
	full                  bool   // the state directory had no room in them
	addressesChangedAt    time.Time
	spent                 spending
	waiting               *commonv1.HostFacts
}

// reported notes the facts that Hello carried.
func (c *hostChanges) reported(facts *commonv1.HostFacts) {
	c.otherFacts, c.addresses = digest(facts)
	c.full = facts.GetStateDisk().GetFull()
}

// take takes the changed facts of a heartbeat, nil for one without. It returns the facts to report now; nil: none.
func (c *hostChanges) take(facts *commonv1.HostFacts, now time.Time) *commonv1.HostFacts {
	if facts == nil {
		facts = c.waiting
	}
	if facts == nil {
		return nil
	}
	c.waiting = nil
	others, addresses := digest(facts)
	most := hostReports
	if facts.GetStateDisk().GetFull() != c.full {
		most = 2 * hostReports
	}
	switch {
	case others == c.otherFacts && addresses == c.addresses:
		return nil
	case others == c.otherFacts && !c.addressesChangedAt.IsZero() && now.Sub(c.addressesChangedAt) < addressesPause,
		!c.spent.spend(now, most, hostPause):
		c.waiting = facts
		return nil
	case addresses != c.addresses:
		c.addressesChangedAt = now
	}
	c.otherFacts, c.addresses, c.full = others, addresses, facts.GetStateDisk().GetFull()
	return facts
}

// digest returns digests of facts without what changes all the time: of all but the addresses, and of the addresses.
func digest(facts *commonv1.HostFacts) (uint64, uint64) {
	sum := maphash.Hash{}
	sum.SetSeed(digests)
	for _, address := range facts.GetAddresses() {
		_, _ = sum.WriteString(address)
		_ = sum.WriteByte(0)
	}
	other := proto.CloneOf(facts)
	if other == nil {
		other = &commonv1.HostFacts{}
	}
	other.Addresses = nil
	for _, disk := range other.GetDisks() {
		disk.FreeBytes = 0
	}
	if disk := other.GetStateDisk(); disk != nil {
		disk.FreeBytes = 0
	}
	data, err := proto.MarshalOptions{Deterministic: true}.Marshal(other)
	if err != nil {
		return 0, sum.Sum64()
	}
	return maphash.Bytes(digests, data), sum.Sum64()
}
