-- +goose Up

-- What showed in this rollback mode that the database is older, each thing once. recovery.rollback keeps the newest of
-- them; these rows say which were counted already, so that one that is reported again is not counted as another.
CREATE TABLE recovery.rollback_seen (
    kind     text        NOT NULL,
    subject  text        NOT NULL,
    since    timestamptz NOT NULL, -- of the mode: a row of an earlier one counts as none
    first_at timestamptz NOT NULL,
    count    bigint      NOT NULL CHECK (count > 0),
    PRIMARY KEY (kind, subject)
);
INSERT INTO recovery.rollback_seen (kind, subject, since, first_at, count)
SELECT e ->> 'kind', e ->> 'subject', r.since, (e ->> 'first')::timestamptz, (e ->> 'count')::bigint
FROM recovery.rollback r CROSS JOIN LATERAL jsonb_array_elements(r.evidence) e WHERE r.state = 'active';

-- +goose Down
DROP TABLE recovery.rollback_seen;
