-- +goose Up

CREATE SCHEMA events;

-- seq is drawn at INSERT, inside the transaction of the state change and after its row update: two events of one
-- aggregate carry their seq in the order of their commits. Between aggregates seq says nothing, and it has holes and
-- late comers: nobody reads by it. Positions are given after the commit, in events.numbered.
--
-- xid stands before seq because defaults are evaluated in the order of the columns: a transaction has its id before it
-- draws a seq, whatever it did before. The sequencer concludes from ids that nobody can commit a low seq any more.
--
-- There are no CHECK constraints: each would be parsed anew by every INSERT. The row policy, whose plan is kept, asks
-- the same of everybody who may insert.
CREATE TABLE events.event (
    xid               xid8        NOT NULL DEFAULT pg_current_xact_id(),
    seq               bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    id                uuid        NOT NULL,
    source            text        NOT NULL DEFAULT current_user,
    kind              text        NOT NULL,
    aggregate_type    text        NOT NULL,
    aggregate_id      text        NOT NULL,
    aggregate_version bigint      NOT NULL,
    payload           jsonb       NOT NULL,
    correlation_id    text,
    tenant_id         text,
    workspace_id      text,
    workflow_id       text,
    allocation_id     text,
    task_id           text,
    node_id           text,
    node_instance_id  text,
    created_at        timestamptz NOT NULL DEFAULT mesh.clock()
);

-- Position tokens are looked up by it. Ids rise with time, so that inserts meet at one end.
CREATE UNIQUE INDEX event_id ON events.event (id);

-- One row a round of the sequencer: the events of seqs, in the order of their seq, have the positions from first_pos to
-- last_pos. A sequencer chooses seqs and says how old the transactions are that it could not see; events.number() does
-- the rest, so that no event is ever numbered twice and positions only rise, whoever inserts.
CREATE TABLE events.numbered (
    seqs      int8multirange NOT NULL,
    -- The oldest transaction that ran in the snapshot that seqs was chosen by.
    oldest    xid8           NOT NULL,
    -- The transaction of this row. Whoever drew a seq up to before had an id below it.
    xid       xid8           NOT NULL,
    first_pos bigint         NOT NULL,
    last_pos  bigint         PRIMARY KEY,
    -- The highest seq numbered before this row, and up to it.
    before    bigint         NOT NULL,
    highest   bigint         NOT NULL,
    -- Every seq without a number that may still come: those above the highest, and the holes below it.
    open      int8multirange NOT NULL
);
-- Which row numbers a seq: the first whose highest is not below it, or one soon after.
CREATE INDEX numbered_highest ON events.numbered (highest);
-- The newest row that all running transactions are younger than.
CREATE INDEX numbered_xid ON events.numbered (xid);

-- +goose StatementBegin
CREATE FUNCTION events.number() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    locked     text;
    last_given bigint;
    lowest_new bigint;
    n          bigint;
    ended      bigint;
BEGIN
    -- The sequencer has this lock already; whoever comes without it waits here. What follows sees what the previous
    -- holder committed.
    locked := pg_advisory_xact_lock(113732703289347)::text;
    SELECT COALESCE(newest.last_pos, 0), COALESCE(newest.highest, 0), COALESCE(newest.open, '{[1,)}'), e.era << 40,
            (SELECT sum(upper(r) - lower(r)) FROM unnest(NEW.seqs) r),
            (SELECT m.before FROM events.numbered m WHERE m.xid <= NEW.oldest ORDER BY m.xid DESC LIMIT 1)
        INTO last_given, NEW.before, NEW.open, lowest_new, n, ended
        FROM mesh.era e LEFT JOIN (SELECT x.last_pos, x.highest, x.open FROM events.numbered x ORDER BY x.last_pos DESC LIMIT 1) newest ON true;
    IF isempty(NEW.seqs) OR upper_inf(NEW.seqs) OR NOT NEW.seqs <@ NEW.open THEN
        RAISE EXCEPTION 'events are numbered once, and those that are there' USING ERRCODE = 'check_violation';
    END IF;
    NEW.xid := pg_current_xact_id();
    NEW.first_pos := GREATEST(last_given + 1, lowest_new);
    NEW.last_pos := NEW.first_pos - 1 + n;
    NEW.highest := GREATEST(NEW.before, upper(NEW.seqs) - 1);
    NEW.open := NEW.open - NEW.seqs;
    -- ended is from the newest row that is older than whatever ran when seqs was chosen: all who had drawn a seq up to
    -- it had ended, so that those which are not numbered by now belong to nobody. A round may have been cut short, but
    -- never below its last seq.
    IF ended IS NOT NULL THEN
        NEW.open := NEW.open - int8multirange(int8range(NULL, LEAST(ended, upper(NEW.seqs) - 1), '[]'));
    END IF;
    RETURN NEW;
END $$;
-- +goose StatementEnd
CREATE TRIGGER number BEFORE INSERT ON events.numbered FOR EACH ROW EXECUTE FUNCTION events.number();

-- Rights are held twice: by the columns granted, and by row policies that hold for the owner as well.
ALTER TABLE events.event ENABLE ROW LEVEL SECURITY;
ALTER TABLE events.event FORCE ROW LEVEL SECURITY;
ALTER TABLE events.numbered ENABLE ROW LEVEL SECURITY;
ALTER TABLE events.numbered FORCE ROW LEVEL SECURITY;

GRANT USAGE ON SCHEMA events TO nodeapi, lifecycle, recovery, readmodel, sequencer;
GRANT SELECT ON events.event, events.numbered TO nodeapi, lifecycle, recovery, readmodel, sequencer;
-- source is insertable so that a foreign one is refused by name rather than ignored; xid, seq and created_at are not.
GRANT INSERT (id, source, kind, aggregate_type, aggregate_id, aggregate_version, payload, correlation_id, tenant_id,
    workspace_id, workflow_id, allocation_id, task_id, node_id, node_instance_id)
    ON events.event TO nodeapi, lifecycle, recovery, readmodel;
GRANT INSERT (seqs, oldest) ON events.numbered TO sequencer;

CREATE POLICY readable ON events.event FOR SELECT TO nodeapi, lifecycle, recovery, readmodel, sequencer USING (true);
CREATE POLICY own_source ON events.event FOR INSERT TO nodeapi, lifecycle, recovery, readmodel
    WITH CHECK (source = current_user::text AND kind <> '' AND aggregate_type <> '' AND aggregate_id <> '');
CREATE POLICY readable ON events.numbered FOR SELECT TO nodeapi, lifecycle, recovery, readmodel, sequencer USING (true);
CREATE POLICY numbering ON events.numbered FOR INSERT TO sequencer WITH CHECK (true);

-- +goose Down
DROP SCHEMA events CASCADE;
