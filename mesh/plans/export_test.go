package plans

import (
	"maps"
	"slices"
)

// Named returns the names of the statements that read the whole fleet, a page of it, or none of it.
func Named() []string {
	return slices.Concat(slices.Sorted(maps.Keys(whole)), slices.Sorted(maps.Keys(machines)),
		slices.Sorted(maps.Keys(paged)), slices.Sorted(maps.Keys(flat)))
}

// without are the tables with ids of machines or workspaces of which a fleet at rest has no rows, and those of failed
// objects.
var without = []string{
	"lifecycle.finding", "lifecycle.gpu_hold", "lifecycle.late_evidence", "lifecycle.orphan_try", "lifecycle.suspicion",
	"lifecycle.unaccounted_instance", "lifecycle.woken_instance", "readmodel.finding", "readmodel.observation",
	"readmodel.impact", "readmodel.recovery_record", "readmodel.verdict", "readmodel.verdict_period",
	"recovery.class_sighting", "recovery.record_request", "lifecycle.task_backlog", "lifecycle.verdict_cordon",
	"recovery.watch_emptied", "recovery.host_record", "recovery.instance", "recovery.recovery_record",
	"recovery.suspect", "recovery.verdict", "recovery.recovery_action",
	"recovery.verdict_period", "recovery.watch_run",
	"recovery.workspace_epoch",
}

// Few returns the tables with columns for ids of machines or workspaces of which Load makes fewer rows than the
// fleet has machines. A table that is added to the product must be filled by the template, or named as one that a
// fleet at rest has no rows of.
func (t *Template) Few(size Size) []string {
	var out []string
	for _, tab := range t.tables {
		if !slices.ContainsFunc(tab.columns, func(c string) bool { return c == "node_id" || c == "workspace_id" }) ||
			!copied(tab.name) || slices.Contains(without, tab.name) {
			continue
		}
		rows := 0
		for _, row := range tab.rows {
			rows += size.copies(t.levelOf(row))
		}
		if rows < size.Nodes {
			out = append(out, tab.name)
		}
	}
	return out
}
