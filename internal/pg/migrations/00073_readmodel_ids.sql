-- +goose Up

-- People give six or more digits of an id: from its beginning, which the primary key finds, or from its end, which is what a table shows. Ids that were made
-- within the same hours begin alike, so what a tenant's person asks for is looked up among the tenant's own.
CREATE INDEX node_by_end ON readmodel.node ((reverse(replace(node_id::text, '-', ''))) COLLATE "C");
CREATE INDEX workspace_by_end ON readmodel.workspace ((reverse(replace(workspace_id::text, '-', ''))) COLLATE "C");
CREATE INDEX task_by_end ON readmodel.task ((reverse(replace(task_id::text, '-', ''))) COLLATE "C");
CREATE INDEX allocation_by_end ON readmodel.allocation ((reverse(replace(allocation_id::text, '-', ''))) COLLATE "C");
CREATE INDEX instance_by_end ON readmodel.instance ((reverse(replace(instance_id::text, '-', ''))) COLLATE "C");
CREATE INDEX claim_by_end ON readmodel.claim ((reverse(replace(claim_id::text, '-', ''))) COLLATE "C");
CREATE INDEX incident_by_end ON readmodel.incident ((reverse(replace(incident_id::text, '-', ''))) COLLATE "C");
CREATE INDEX finding_by_end ON readmodel.finding ((reverse(replace(finding_id::text, '-', ''))) COLLATE "C");
CREATE INDEX run_by_end ON readmodel.run ((reverse(replace(run_id::text, '-', ''))) COLLATE "C");
CREATE INDEX recovery_record_by_end ON readmodel.recovery_record ((reverse(replace(record_id::text, '-', ''))) COLLATE "C");
CREATE INDEX workspace_by_tenant_and_id ON readmodel.workspace (tenant_id, workspace_id);
CREATE INDEX instance_by_tenant_and_id ON readmodel.instance (tenant_id, instance_id);
CREATE INDEX run_by_tenant_and_id ON readmodel.run (tenant_id, run_id);
CREATE INDEX recovery_record_by_tenant_and_id ON readmodel.recovery_record (tenant_id, record_id);

-- +goose Down
DROP INDEX readmodel.workspace_by_tenant_and_id, readmodel.instance_by_tenant_and_id, readmodel.run_by_tenant_and_id, readmodel.recovery_record_by_tenant_and_id,
    readmodel.node_by_end, readmodel.workspace_by_end, readmodel.task_by_end, readmodel.allocation_by_end, readmodel.instance_by_end, readmodel.claim_by_end, readmodel.incident_by_end, readmodel.finding_by_end, readmodel.run_by_end, readmodel.recovery_record_by_end;
