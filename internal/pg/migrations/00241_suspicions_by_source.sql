-- +goose Up

-- Each detector suspects by itself: with one row for all, what one no longer saw was forgotten for the others too.
ALTER TABLE lifecycle.suspicion DROP CONSTRAINT suspicion_pkey,
    ADD CONSTRAINT suspicion_pkey PRIMARY KEY (kind, subject_type, subject_id, source);

-- +goose Down
-- One row for all again: the oldest.
DELETE FROM lifecycle.suspicion s USING lifecycle.suspicion o
    WHERE o.kind = s.kind AND o.subject_type = s.subject_type AND o.subject_id = s.subject_id
        AND (o.since, o.source) < (s.since, s.source);
ALTER TABLE lifecycle.suspicion DROP CONSTRAINT suspicion_pkey,
    ADD CONSTRAINT suspicion_pkey PRIMARY KEY (kind, subject_type, subject_id);
