// Package bench holds the parts that all benches share: the form of a result, and the environment it was measured in.
//
// A result is an absolute value beside a raw baseline measured in the same run on the same machine; only their ratio is
// required to hold.
package bench

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/gpuaas/mesh/internal/pg"
)

// Result is the result of a bench.
type Result struct {
	Name     string  `json:"name"`
	Value    float64 `json:"value"`
	Unit     string  `json:"unit"`
	Baseline float64 `json:"baseline"` // in Unit or in the unit that Details names
	Ratio    float64 `json:"ratio"`    // of Value to Baseline
	Required float64 `json:"required"` // bound on Ratio
	Passed   bool    `json:"passed"`
	// NotChecked lists the further requirements that could not be checked here, each with the reason.
	NotChecked []string `json:"not_judged,omitempty"`
	// Details are further figures and the environment.
	Details map[string]any `json:"details,omitempty"`
}

// WriteJSON prints the result as one indented JSON object.
func (r Result) WriteJSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	if err := e.Encode(r); err != nil {
		return fmt.Errorf("print result: %w", err)
	}
	return nil
}

// WriteText prints the result for people, details in the order of their names.
func (r Result) WriteText(w io.Writer) error {
	verdict := "passed"
	if !r.Passed {
		verdict = "FAILED"
	}
	if len(r.NotChecked) > 0 {
		verdict += ", not judged: " + strings.Join(r.NotChecked, "; ")
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %.4g %s, baseline %.4g, ratio %.4f (required %.4g): %s\n", r.Name, r.Value, r.Unit, r.Baseline,
		r.Ratio, r.Required, verdict)
	for _, k := range slices.Sorted(maps.Keys(r.Details)) {
		fmt.Fprintf(&b, "  %-28s %v\n", k, r.Details[k])
	}
	if _, err := io.WriteString(w, b.String()); err != nil {
		return fmt.Errorf("print result: %w", err)
	}
	return nil
}

var currentSetting = pg.Define(pg.RoleOwner, "bench.current_setting", `SELECT current_setting($1)`)

// Machine returns a description of the machine.
func Machine() map[string]any {
	return map[string]any{
		"env_cpus": runtime.NumCPU(), "env_cpu": cpuModel(), "env_go": runtime.Version(),
		"env_os":          runtime.GOOS + "/" + runtime.GOARCH,
		"env_measured_at": time.Now().UTC().Format(time.RFC3339),
	}
}

// Environment returns a description of the machine with the database's version and durability settings. A database
// without fsync is refused: durability is not simulated.
func Environment(ctx context.Context, db pg.Querier) (map[string]any, error) {
	env := Machine()
	for key, setting := range map[string]string{
		"env_postgres": "server_version", "env_fsync": "fsync", "env_synchronous_commit": "synchronous_commit",
		"env_shared_buffers":   "shared_buffers",
		"env_full_page_writes": "full_page_writes",
	} {
		v, err := pg.Value[string](ctx, db, currentSetting, setting)
		if err != nil {
			return nil, fmt.Errorf("read setting %s: %w", setting, err)
		}
		env[key] = v
	}
	if env["env_fsync"] != "on" || env["env_synchronous_commit"] == "off" {
		return nil, fmt.Errorf("the database does not write durably: fsync %v, synchronous_commit %v", env["env_fsync"],
			env["env_synchronous_commit"])
	}
	return env, nil
}

func cpuModel() string {
	raw, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return "unknown"
	}
	for line := range strings.Lines(string(raw)) {
		if name, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return "unknown"
}

// Percentile returns the p-th percentile (0 to 1) of durations in milliseconds; it sorts them in place. It returns zero
// if there are none.
func Percentile(durations []time.Duration, p float64) float64 {
	if len(durations) == 0 {
		return 0
	}
	slices.Sort(durations)
	i := min(int(p*float64(len(durations))), len(durations)-1)
	return float64(durations[i].Microseconds()) / 1000
}
