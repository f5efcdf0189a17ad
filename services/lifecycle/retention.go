package lifecycle

import (
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/retention"
)

// terms are the kinds of rows of lifecycle that have a retention, in an order in which rows that refer to another one
// are deleted before it.
var terms = []retention.Table{
	{Name: "tasks", Key: policy.RetentionTasksSeconds, Table: "task", ID: "task_id"},
	{Name: "claims", Key: policy.RetentionRunsSeconds, Table: "resource_claim", ID: "id"},
	{Name: "runs", Key: policy.RetentionRunsSeconds, Table: "saga_run", ID: "id"},
	{Name: "allocations", Key: policy.RetentionRunsSeconds, Table: "allocation", ID: "allocation_id"},
	{Name: "instances", Key: policy.RetentionRunsSeconds, Table: "instance", ID: "instance_id"},
	{Name: "unaccounted", Key: policy.RetentionRunsSeconds, Table: "unaccounted_instance", ID: "instance_id"},
	{Name: "operation_keys", Key: policy.RetentionOperationKeysSeconds},
	{Name: "findings", Key: policy.RetentionFindingsSeconds, Table: "finding", ID: "finding_id"},
	{Name: "evidence", Key: policy.RetentionFindingsSeconds},
	{Name: "workspaces", Key: policy.RetentionWorkspacesSeconds, Table: "workspace", ID: "id"},
	{Name: "gates", Key: policy.RetentionIdentitiesSeconds, Table: "node_gate", ID: "node_id"},
}

var (
	cutBatch = pg.DefineDynamic(pg.RoleLifecycle, "lifecycle.cut_batch",
		func(t retention.Table) string { return t.Call("lifecycle") }, terms...)
	oldestLeft = pg.DefineDynamic(pg.RoleLifecycle, "lifecycle.oldest_left",
		func(t retention.Table) string { return t.Oldest("lifecycle") }, terms...)

	// cuts are the deletions of lifecycle's retention.
	cuts = retention.Of(terms, cutBatch.For, oldestLeft.For)
)
