package isolation

import (
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuaas/mesh/agent/runtime/procfs"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
)

func TestDetect(t *testing.T) {
	v1 := "cgroup /sys/fs/cgroup/pids cgroup rw,pids 0 0\ncgroup /sys/fs/cgroup/freezer cgroup rw,freezer 0 0\ncgroup " +
		"/sys/fs/cgroup/cpu cgroup rw,cpu,cpuacct 0 0\n"
	tests := []struct {
		name, mounts, own string
		refuse            string
		want              Cgroups
	}{
		{name: "none", mounts: "proc /proc proc rw 0 0\n", own: ""},
		{
			name: "version 2 makes a sibling", mounts: "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n",
			own:  "0::/system.slice/agent.service\n",
			want: Cgroups{Version: 2, Roots: []string{"/sys/fs/cgroup/system.slice/R"}},
		},
		{
			name: "version 2 in a container", mounts: "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n", own: "0::/\n",
			want: Cgroups{Version: 2, Roots: []string{"/sys/fs/cgroup/R"}},
		},
		{name: "version 2 read only", mounts: "cgroup2 /sys/fs/cgroup cgroup2 ro 0 0\n", own: "0::/\n", refuse: "/sys"},
		{
			name: "version 1, an empty version 2 beside it", mounts: v1 + "cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n",
			own:  "8:pids:/a\n6:freezer:/\n0::/\n",
			want: Cgroups{Version: 1, Roots: []string{"/sys/fs/cgroup/pids/a/R", "/sys/fs/cgroup/freezer/R"}},
		},
		{
			name: "version 1, one refused", mounts: v1, own: "8:pids:/\n6:freezer:/\n", refuse: "/sys/fs/cgroup/pids",
			want: Cgroups{Version: 1, Roots: []string{"/sys/fs/cgroup/freezer/R"}},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got := detect(tt.mounts, tt.own, "R", func(dir string) error {
				if tt.refuse != "" && strings.HasPrefix(dir, tt.refuse) {
					return errors.New("refused")
				}
				return nil
			})
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestDeniedDevices(t *testing.T) {
	host := []*commonv1.Gpu{
		{DeviceId: "GPU-a", Index: 0},
		{DeviceId: "GPU-b", Index: 1},
		{DeviceId: "gpu-2", Index: 2, Simulated: true},
	}
	got := DeniedDevices(host, []string{"GPU-b"})
	if !slices.Equal(got, []string{"c 195:0 rwm"}) {
		t.Errorf("rules %q", got)
	}
}

func TestDescends(t *testing.T) {
	all := map[int]procfs.Stat{10: {Parent: 1}, 11: {Parent: 10}, 12: {Parent: 11}, 20: {Parent: 1}, 30: {Parent: 30}}
	for pid, want := range map[int]bool{10: true, 11: true, 12: true, 20: false, 30: false, 99: false} {
		if got := descends(all, pid, 10); got != want {
			t.Errorf("descends(%d, 10) = %t", pid, got)
		}
	}
}

func TestReachable(t *testing.T) {
	if !Reachable("/bin/sh") {
		t.Error("/bin/sh is not reachable")
	}
	if err := CheckReachable(filepath.Join(t.TempDir(), "x")); err == nil && !Reachable(t.TempDir()) {
		t.Error("a closed directory was not named")
	}
}
