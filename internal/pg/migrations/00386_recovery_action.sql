-- +goose Up

-- Recoveries of nodes, each from the first rejection to the healthy verdict. The nil UUID is the control plane.
CREATE TABLE recovery.recovery_action (
    action_id            uuid        PRIMARY KEY,
    node_id              uuid        NOT NULL,
    kind                 text        NOT NULL,
    state                text        NOT NULL,
    reason               text        NOT NULL, -- unspecified: none was concluded
    requester            text        NOT NULL,
    correlation_id       text        NOT NULL,
    agent_correlation_id text        NOT NULL, -- of the agent's own log, where it differs
    first_rejected_at    timestamptz,          -- null: nothing was refused
    begun_at             timestamptz NOT NULL,
    effect_at            timestamptz,
    session_at           timestamptz,          -- the first session on the certificate that it brought
    healthy_at           timestamptz,
    ended_at             timestamptz,
    fails_at             timestamptz NOT NULL, -- when an open one fails
    attempts             integer     NOT NULL,
    outcome              text        NOT NULL,
    version              bigint      NOT NULL,
    CHECK ((state = 'open') = (ended_at IS NULL))
) WITH (fillfactor = 70);
CREATE UNIQUE INDEX recovery_action_open ON recovery.recovery_action (node_id, kind) WHERE state = 'open';
CREATE INDEX recovery_action_fails ON recovery.recovery_action (fails_at, action_id) WHERE state = 'open';
CREATE INDEX recovery_action_of_state ON recovery.recovery_action (state, action_id);
CREATE INDEX recovery_action_of_node ON recovery.recovery_action (node_id, action_id);

-- +goose StatementBegin
CREATE FUNCTION recovery.cut_recovery_actions(term interval, lowest uuid, most integer, OUT cut bigint, OUT next uuid)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    until timestamptz := mesh.clock() - term;
    seen  uuid[];
BEGIN
    cut := 0;
    IF mesh.rolled_back() THEN
        RETURN;
    END IF;
    SELECT array_agg(o.id) INTO seen FROM (SELECT t.action_id AS id FROM recovery.recovery_action t
        WHERE t.action_id > lowest AND t.action_id < mesh.first_id(until) ORDER BY t.action_id LIMIT most) o;
    next := seen[most];
    WITH gone AS (
        DELETE FROM recovery.recovery_action t WHERE t.action_id = ANY (seen) AND t.ended_at < until
        RETURNING t.action_id AS id)
    SELECT count(*) INTO cut FROM gone;
END $$;
-- +goose StatementEnd
REVOKE ALL ON FUNCTION recovery.cut_recovery_actions(interval, uuid, integer) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION recovery.cut_recovery_actions(interval, uuid, integer) TO recovery;
GRANT CREATE ON SCHEMA recovery TO mesh_retention;
ALTER FUNCTION recovery.cut_recovery_actions(interval, uuid, integer) OWNER TO mesh_retention;
REVOKE CREATE ON SCHEMA recovery FROM mesh_retention;
GRANT SELECT, DELETE ON recovery.recovery_action TO mesh_retention;

-- +goose Down
DROP FUNCTION recovery.cut_recovery_actions(interval, uuid, integer);
DROP TABLE recovery.recovery_action;
