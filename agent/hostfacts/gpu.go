package hostfacts

import (
	"bytes"
	"cmp"
	"context"
	"encoding/csv"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
)

const (
	maxGPUs = 64
	smiWait = 5 * time.Second
	smiMax  = 256 << 10
)

func (c Config) gpus(ctx context.Context) []*commonv1.Gpu {
	if c.SimulatedGPUs > 0 {
		driver := "simulated"
		if c.Root != "" {
			driver = cmp.Or(c.driverVersion(), driver)
		}
		return simulated(min(c.SimulatedGPUs, maxGPUs), driver)
	}
	found := c.fromDriver()
	if len(found) > 0 {
		c.askSMI(ctx, found)
	}
	slices.SortFunc(found, func(a, b *commonv1.Gpu) int { return cmp.Compare(a.GetIndex(), b.GetIndex()) })
	return found
}

func simulated(n int, driver string) []*commonv1.Gpu {
	out := make([]*commonv1.Gpu, n)
	for i := range out {
		out[i] = &commonv1.Gpu{
			DeviceId: fmt.Sprintf("gpu-%d", i), Index: int32(i), Model: "Simulated GPU", MemoryBytes: 16 << 30,
			DriverVersion: driver, Simulated: true,
		}
	}
	return out
}

// fromDriver reads the kernel module's files about each device: one directory per PCI address.
func (c Config) fromDriver() []*commonv1.Gpu {
	dirs, err := filepath.Glob(c.path("proc/driver/nvidia/gpus/*/information"))
	if err != nil {
		return nil
	}
	slices.Sort(dirs)
	version := c.driverVersion()
	var out []*commonv1.Gpu
	for i, path := range dirs[:min(len(dirs), maxGPUs)] {
		data, err := os.ReadFile(path) // below the driver's directory
		if err != nil {
			continue
		}
		g := &commonv1.Gpu{DeviceId: fmt.Sprintf("gpu-%d", i), Index: int32(i), DriverVersion: version}
		for line := range strings.Lines(string(data)) {
			name, value, ok := strings.Cut(line, ":")
			value = clean(value)
			if !ok || value == "" {
				continue
			}
			switch strings.TrimSpace(name) {
			case "Model":
				g.Model = value
			case "GPU UUID":
				if !strings.Contains(value, "?") { // the driver prints question marks until a device was opened once
					g.DeviceId = value
				}
			case "Device Minor":
				if n, err := strconv.ParseInt(value, 10, 32); err == nil && n >= 0 {
					g.Index = int32(n)
				}
			}
		}
		out = append(out, g)
	}
	return out
}

// driverVersion reads `NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  ...`.
func (c Config) driverVersion() string {
	for word := range strings.FieldsSeq(c.line("proc/driver/nvidia/version")) {
		if strings.Count(word, ".") >= 1 && word[0] >= '0' && word[0] <= '9' {
			return word
		}
	}
	return ""
}

// askSMI adds what the files lack: the memory, and the id of a device that was never opened. The tool may hang with a
// broken driver, so it is given a few seconds; without it the facts are those of the files.
func (c Config) askSMI(ctx context.Context, found []*commonv1.Gpu) {
	if c.Root != "" && c.SMI == "" {
		return // the tool would read the real host
	}
	path, err := exec.LookPath(cmp.Or(c.SMI, "nvidia-smi"))
	if err != nil || c.SMI == "-" {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, smiWait)
	defer cancel()
	// a fixed command
	cmd := exec.CommandContext(ctx, path, "--query-gpu=uuid,pci.bus_id,memory.total,driver_version,name",
		"--format=csv,noheader,nounits")
	cmd.WaitDelay = time.Second
	var out bytes.Buffer
	cmd.Stdout = &out
	if cmd.Run() != nil || out.Len() > smiMax {
		return
	}
	reader := csv.NewReader(&out)
	reader.TrimLeadingSpace = true
	rows, err := reader.ReadAll()
	if err != nil {
		return
	}
	for i, row := range rows {
		if len(row) < 5 {
			continue
		}
		g := match(found, row[0], i)
		if g == nil {
			continue
		}
		g.DeviceId = clean(row[0])
		if mib, err := strconv.ParseInt(row[2], 10, 64); err == nil {
			g.MemoryBytes = mib << 20
		}
		g.DriverVersion = cmp.Or(g.GetDriverVersion(), clean(row[3]))
		g.Model = cmp.Or(g.GetModel(), clean(row[4]))
	}
}

// match returns the device with the id, else the one at the same place, since both lists are in the order of PCI
// addresses; nil if there is none.
func match(found []*commonv1.Gpu, id string, place int) *commonv1.Gpu {
	if at := slices.IndexFunc(found, func(g *commonv1.Gpu) bool { return g.GetDeviceId() == id }); at >= 0 {
		return found[at]
	}
	if place < len(found) && strings.HasPrefix(found[place].GetDeviceId(), "gpu-") {
		return found[place]
	}
	return nil
}
