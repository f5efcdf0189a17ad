package collect

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/shown"
)

const (
	mostDevices   = 64
	mostAddresses = 64
	mostRemotes   = 8   // that are remembered of a node
	mostText      = 128 // bytes of one fact
)

// Runtime is what workloads on a host rest on.
type Runtime struct {
	Devices   []Device `json:"devices,omitempty"`
	Driver    string   `json:"driver,omitempty"`
	Kernel    string   `json:"kernel,omitempty"`
	Container string   `json:"container,omitempty"`
}

// Device is one GPU.
type Device struct {
	ID    string `json:"id"`
	Model string `json:"model,omitempty"`
}

// nameless reports whether the device has the id of its place alone: the driver has not named it.
func (d Device) nameless() bool { return strings.HasPrefix(d.ID, "gpu-") }

// RuntimeOf returns what the facts of a host have of its runtime, cleaned and bounded.
func RuntimeOf(facts *commonv1.HostFacts) Runtime {
	r := Runtime{Kernel: plain(facts.GetKernel()), Container: plain(facts.GetContainerRuntime())}
	gpus := slices.Clone(facts.GetGpus()[:min(len(facts.GetGpus()), mostDevices)])
	slices.SortStableFunc(gpus, func(a, b *commonv1.Gpu) int { return cmp.Compare(a.GetIndex(), b.GetIndex()) })
	var drivers []string
	for _, g := range gpus {
		r.Devices = append(r.Devices, Device{ID: plain(g.GetDeviceId()), Model: plain(g.GetModel())})
		if v := plain(g.GetDriverVersion()); v != "" {
			drivers = append(drivers, v)
		}
	}
	slices.Sort(drivers)
	r.Driver = Cut(strings.Join(slices.Compact(drivers), ", "), mostText)
	return r
}

// unknown reports whether nothing is known of the host.
func (r Runtime) unknown() bool { return len(r.Devices) == 0 && r.Driver+r.Kernel+r.Container == "" }

// Completed returns r with what it lacks and other has: what was not known when the facts were accepted. Devices are
// never added.
func (r Runtime) Completed(other Runtime) Runtime {
	r.Driver, r.Kernel, r.Container = cmp.Or(r.Driver, other.Driver), cmp.Or(r.Kernel, other.Kernel),
		cmp.Or(r.Container, other.Container)
	if len(r.Devices) == len(other.Devices) && sameDevices(r.Devices, other.Devices) {
		r.Devices = slices.Clone(r.Devices)
		for i, d := range other.Devices {
			if r.Devices[i].nameless() {
				r.Devices[i] = Device{ID: d.ID, Model: cmp.Or(r.Devices[i].Model, d.Model)}
			}
		}
	}
	return r
}

// Differences returns in words what of the runtime is not as in accepted; empty if nothing differs. A text that is
// missing on either side is not known, and no difference. Other differences have other texts: where not all is written
// out, the text ends with a fingerprint of the rest.
func (r Runtime) Differences(accepted Runtime) string {
	var out []string
	if !sameDevices(r.Devices, accepted.Devices) {
		out = append(out, fmt.Sprintf("GPUs are %s, accepted are %s", listed(r.Devices), listed(accepted.Devices)))
	}
	for _, f := range []struct{ name, is, was string }{
		{"GPU driver", r.Driver, accepted.Driver},
		{"kernel", r.Kernel, accepted.Kernel},
		{"container runtime", r.Container, accepted.Container},
	} {
		if f.is != "" && f.was != "" && f.is != f.was {
			out = append(out, fmt.Sprintf("%s is %s, accepted is %s", f.name, f.is, f.was))
		}
	}
	text := strings.Join(out, "; ")
	if len(text) <= MostDetail {
		return text
	}
	mark := " … " + shown.Fingerprint(text)
	return Cut(text, MostDetail-len(mark)) + mark
}

// sameDevices reports whether two hosts have the same devices: by their ids, in any order, or by their places where the
// driver has not named all of them.
func sameDevices(a, b []Device) bool {
	if len(a) != len(b) {
		return false
	}
	sameModel := func(x, y Device) bool { return x.Model == "" || y.Model == "" || x.Model == y.Model }
	if slices.ContainsFunc(a, Device.nameless) || slices.ContainsFunc(b, Device.nameless) {
		return slices.EqualFunc(a, b, func(x, y Device) bool {
			return (x.nameless() || y.nameless() || x.ID == y.ID) && sameModel(x, y)
		})
	}
	byID := func(x, y Device) int { return cmp.Compare(x.ID, y.ID) }
	return slices.EqualFunc(slices.SortedFunc(slices.Values(a), byID), slices.SortedFunc(slices.Values(b), byID),
		func(x, y Device) bool { return x.ID == y.ID && sameModel(x, y) })
}

// listed returns devices in words: how many, the first few, and a fingerprint of all if there are more.
func listed(devices []Device) string {
	if len(devices) == 0 {
		return "none"
	}
	const most = 3
	var few []string
	for _, d := range devices[:min(len(devices), most)] {
		few = append(few, strings.TrimSpace(d.Model+" "+d.ID))
	}
	if len(devices) > most {
		few = append(few, "… "+shown.Fingerprint(Runtime{Devices: devices}.Text()))
	}
	return fmt.Sprintf("%d (%s)", len(devices), strings.Join(few, ", "))
}

// Text returns the form in which the runtime of a host is stored.
func (r Runtime) Text() string {
	data, _ := json.Marshal(r) // of texts alone, which always succeeds
	return string(data)
}

// RuntimeFrom returns the runtime that Text has written. It fails on the form of a newer build.
func RuntimeFrom(text string) (Runtime, error) {
	var r Runtime
	if err := json.Unmarshal([]byte(text), &r); err != nil {
		return Runtime{}, fmt.Errorf("read facts of a host: %w", err)
	}
	return r, nil
}

// addressesOf returns the addresses in the facts of a host, sorted, each once, at most mostAddresses. What is none is
// left out.
func addressesOf(facts *commonv1.HostFacts) []string {
	out := []string{}
	for _, text := range facts.GetAddresses() {
		if addr, err := netip.ParseAddr(text); err == nil && len(text) <= mostText {
			out = append(out, addr.WithZone("").String())
		}
	}
	slices.Sort(out)
	out = slices.Compact(out)
	return out[:min(len(out), mostAddresses)]
}

// remoteOf returns the address of host:port; empty if it has none.
func remoteOf(address string) string {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return ""
	}
	addr, err := netip.ParseAddr(host)
	if err != nil {
		return ""
	}
	return addr.WithZone("").Unmap().String()
}

// addressesDiffer returns in words how addresses have changed; empty if they have not.
func addressesDiffer(was, is []string) string {
	var out []string
	without := func(list, other []string) string {
		return strings.Join(slices.DeleteFunc(slices.Clone(list), func(a string) bool {
			return slices.Contains(other, a)
		}), ", ")
	}
	if added := without(is, was); added != "" {
		out = append(out, "it has "+added+" now")
	}
	if lost := without(was, is); lost != "" {
		out = append(out, "it has "+lost+" no more")
	}
	return Cut(strings.Join(out, "; "), MostDetail)
}

// plain returns a text of a host for people: one line of printable characters, at most mostText bytes.
func plain(s string) string {
	return Cut(strings.TrimSpace(audit.Printable(Cut(s, 4*mostText))), mostText)
}

// Cut returns the longest beginning of a text that has at most that many bytes and is valid UTF-8.
func Cut(s string, most int) string {
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most], "")
}
