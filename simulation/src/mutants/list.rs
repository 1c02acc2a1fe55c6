//! The mutants.

use super::{Edit, Mutant};

/// Bugs that a storage provider must not have, and that the simulation must find.
pub const LIST: &[Mutant] = &[
    Mutant {
        name: "ghost-message",
        what: "a turn consumes messages that it only remembers, whether they are still there or not",
        edits: &[
            Edit {
                file: "src/turn/plan.rs",
                find: "return Ok(Operation::delete(id, Some(etag)));",
                replace: "return Ok(Operation::delete(id, Some(etag).filter(|_| !MUTANT)));",
            },
            Edit {
                file: "src/turn/plan.rs",
                find: "Operation::replace(id, &marker, Some(etag))",
                replace: "Operation::replace(id, &marker, Some(etag).filter(|_| !MUTANT))",
            },
            Edit {
                file: "src/turn/commit.rs",
                find: "rolled_back.status == 404 && ActivityDocument::is_activity_id(id)",
                replace: "rolled_back.status == 404 && (ActivityDocument::is_activity_id(id) || MUTANT)",
            },
            Edit {
                file: "src/turn/commit.rs",
                find: "if !plan.document.staging.is_empty() {",
                replace: "plan.consumption.retain(|operation| !gone.iter().any(|id| id == operation.document_id()));
        if !plan.document.staging.is_empty() {",
            },
        ],
    },
    Mutant {
        name: "unfenced-commit",
        what: "a commit does not depend on the instance's document being as its turn left it",
        edits: &[Edit {
            file: "src/turn/commit.rs",
            find: "Operation::replace(instance_id(), &plan.document, Some(&state.etag))",
            replace: "Operation::replace(instance_id(), &plan.document, Some(&state.etag).filter(|_| !MUTANT))",
        }],
    },
    Mutant {
        name: "delivery-without-marker",
        what: "a consumed delivery leaves no marker, so that its second copy is new",
        edits: &[
            Edit {
                file: "src/turn/plan.rs",
                find: "if !document.delivered {",
                replace: "if !document.delivered || MUTANT {",
            },
            Edit {
                file: "src/orders/turn.rs",
                find: "(true, true) => {",
                replace: "(true, true) if MUTANT => None,
        (true, true) => {",
            },
        ],
    },
    Mutant {
        name: "unfenced-sweep",
        what: "into_inner meets an instance sweeps what is staged, also for a turn that is under way",
        edits: &[Edit {
            file: "src/turn/claim.rs",
            find: "    if let Some(until) = document.locked_until(engine.now()) {",
            replace: "    for note in document.staging.iter().filter(|_| MUTANT) {
        for part in 0..note.parts {
            let id = crate::model::StagedDocument::document_id(&note.key, part);
            engine.store.delete(&document.instance_id, &id, None, deadline).await?;
        }
    }
    if let Some(until) = document.locked_until(engine.now()) {",
        }],
    },
    Mutant {
        name: "uncounted-turn",
        what: "a claim of a turn is not counted",
        edits: &[Edit {
            file: "src/model/documents.rs",
            find: "self.claims.push(now.max(after));",
            replace: "if !MUTANT {
            self.claims.push(now.max(after));
        }",
        }],
    },
    Mutant {
        name: "uncounted-activity",
        what: "a claim of an activity that was claimed before is not counted",
        edits: &[Edit {
            file: "src/model/documents.rs",
            find: "        self.attempts += 1;",
            replace: "        self.attempts += u32::from(!(MUTANT && self.attempts > 0));",
        }],
    },
    Mutant {
        name: "lost-answer-is-failure",
        what: "a delivery whose answer was lost is sent again as another message",
        edits: &[Edit {
            file: "src/outbox/mod.rs",
            find: "    let written = engine.store.create(&intent.target, &id, &intent.document, deadline).await?;",
            replace: "    let written = engine.store.create(&intent.target, &id, &intent.document, deadline).await?;
    if MUTANT && matches!(written, WriteOutcome::Refused(Refusal::Exists)) {
        let mut again = intent.document.clone();
        let id = DocumentId::new(\"m\", &[&engine.new_token(), \"0\"]);
        again[\"id\"] = serde_json::Value::from(id.to_string());
        engine.store.create(&intent.target, &id, &again, deadline).await?;
    }",
        }],
    },
    Mutant {
        name: "completion-apart",
        what: "an activity is deleted by one request and its completion created by the next",
        edits: &[
            Edit {
                file: "src/work/complete.rs",
                find: "message.filter(|m| m.instance_id == handle.partition)",
                replace: "message.filter(|m| m.instance_id == handle.partition && !MUTANT)",
            },
            Edit {
                file: "src/work/complete.rs",
                find: "message.filter(|m| m.instance_id != handle.partition)",
                replace: "message.filter(|m| m.instance_id != handle.partition || MUTANT)",
            },
        ],
    },
    Mutant {
        name: "early-timer",
        what: "a timer that this process remembers goes with the next turn, due or not",
        edits: &[Edit {
            file: "src/turn/open.rs",
            find: "m.document.due <= ours.claimed_at && !engine",
            replace: "(m.document.due <= ours.claimed_at || MUTANT) && !engine",
        }],
    },
    Mutant {
        name: "stale-history",
        what: "a claim that was refused for what it knew is made again with the history that it knew",
        edits: &[
            Edit {
                file: "src/turn/claim.rs",
                find: "    // What was cached may be stale, so there is a second look at most.",
                replace: "    let stale = known.as_ref().and_then(|known| known.contents.clone()).filter(|_| MUTANT);",
            },
            Edit {
                file: "src/turn/claim.rs",
                find: "                known = look(engine, partition, deadline).await?;
",
                replace: "                known = look(engine, partition, deadline).await?;
                if let (Some(known), Some(stale)) = (&mut known, &stale) {
                    known.contents = Some(stale.clone());
                }
",
            },
        ],
    },
    Mutant {
        name: "lock-ignored",
        what: "a candidate says that an activity is free, and its lock is not looked at",
        edits: &[Edit {
            file: "src/work/claim.rs",
            find: "if document.due > now {",
            replace: "if document.due > now && !(MUTANT && document.lock.is_some()) {",
        }],
    },
    Mutant {
        name: "unconditional-claim",
        what: "two processes that claim an instance at once both have it",
        edits: &[Edit {
            file: "src/turn/claim.rs",
            find: "engine.store.replace(partition, &instance_id(), &document, Some(&etag), deadline)",
            replace:
                "engine.store.replace(partition, &instance_id(), &document, Some(&etag).filter(|_| !MUTANT), deadline)",
        }],
    },
    Mutant {
        name: "unconditional-hand-over",
        what: "a claim that goes with a message does not depend on the instance being as it is known",
        edits: &[Edit {
            file: "src/orders/turn.rs",
            find: "Operation::replace(instance_id(), &claim.document, Some(etag))?,",
            replace: "Operation::replace(instance_id(), &claim.document, Some(etag).filter(|_| !MUTANT))?,",
        }],
    },
    Mutant {
        name: "uncounted-kept-turn",
        what: "a lock that a commit keeps for the next turn is no attempt",
        edits: &[Edit {
            file: "src/orders/kept.rs",
            find: "document.claims.push(self.claimed_at);",
            replace: "document.claims.extend(Some(self.claimed_at).filter(|_| !MUTANT));",
        }],
    },
    Mutant {
        name: "inlined-message-lost",
        what: "a claim that is given back takes the message along that came with it",
        edits: &[Edit {
            file: "src/turn/release.rs",
            find: "if let Some(message) = &inlined {",
            replace: "if let Some(message) = inlined.as_ref().filter(|_| !MUTANT) {",
        }],
    },
    Mutant {
        name: "inlined-message-unseen",
        what: "nobody looks at a message that is in the document of an instance whose worker has died",
        edits: &[Edit {
            file: "src/model/documents.rs",
            find: "if self.inlined.is_some() {",
            replace: "if self.inlined.is_some() && !MUTANT {",
        }],
    },
    Mutant {
        name: "session-of-another",
        what: "a session is taken without a look at its owner",
        edits: &[Edit {
            file: "src/work/session.rs",
            find: "found.document.locked_until > now && found.document.owner != owner.owner_id",
            replace: "found.document.locked_until > now && found.document.owner != owner.owner_id && !MUTANT",
        }],
    },
    Mutant {
        name: "part-skipped",
        what: "a roll-forward leaves out the last part of a committed turn",
        edits: &[Edit {
            file: "src/turn/staging.rs",
            find: "if roll_forward.next + 1 < roll_forward.parts {",
            replace: "if roll_forward.next + 1 + usize::from(MUTANT) < roll_forward.parts {",
        }],
    },
    Mutant {
        name: "turn-before-history",
        what: "a turn is handed out before the one before it is rolled forward",
        // Two checks keep that from happening: the claim's, and the comparison of the history with the document.
        edits: &[
            Edit {
                file: "src/turn/claim.rs",
                find: "if document.roll_forward.is_some() {",
                replace: "if document.roll_forward.is_some() && !MUTANT {",
            },
            Edit {
                file: "src/turn/open.rs",
                find: "while let Some(lacks) = lacks(&loaded, ours) {",
                replace: "while let Some(lacks) = lacks(&loaded, ours).filter(|_| !(MUTANT && ours.document.roll_forward.is_some())) {",
            },
        ],
    },
    Mutant {
        name: "values-outlive-instance",
        what: "a deletion leaves the values of the instance",
        edits: &[Edit {
            file: "src/admin/erase.rs",
            find: "rows.retain(|row| !matches!(row.kind.as_str(), kind::INSTANCE | kind::DELIVERED));",
            replace: "rows.retain(|row| !matches!(row.kind.as_str(), kind::INSTANCE | kind::DELIVERED));
    rows.retain(|row| !(MUTANT && row.kind == kind::KV));",
        }],
    },
    Mutant {
        name: "payload-left-behind",
        what: "an activity that ends leaves the document of its input",
        edits: &[Edit {
            file: "src/work/complete.rs",
            find: "let mut with_payload = state.document.has_payload_document();",
            replace: "let mut with_payload = state.document.has_payload_document() && !MUTANT;",
        }],
    },
    Mutant {
        name: "late-completion",
        what: "a worker that has lost its activity ends it all the same",
        edits: &[
            Edit {
                file: "src/work/complete.rs",
                find: "if state.closed || state.until <= engine.now() {
        // It has run",
                replace: "if state.closed || (state.until <= engine.now() && !MUTANT) {
        // It has run",
            },
            Edit {
                file: "src/work/complete.rs",
                find: "Operation::delete(state.document.id.clone(), Some(&state.etag))",
                replace: "Operation::delete(state.document.id.clone(), Some(&state.etag).filter(|_| !MUTANT))",
            },
            Edit {
                file: "src/work/complete.rs",
                find: "        let deadline = engine.deadline_at(state.until);
        let mut operations",
                replace:
                    "        let deadline = if MUTANT { engine.deadline() } else { engine.deadline_at(state.until) };
        let mut operations",
            },
        ],
    },
    Mutant {
        name: "intent-forgotten",
        what: "an intent is deleted before its message is delivered",
        edits: &[Edit {
            file: "src/outbox/mod.rs",
            find: "        let arrived = deliver_all(&engine_too, intents, deadline).await;
        if sender",
            replace: "        if MUTANT {
            forget(&engine_too, intents.clone(), deadline).await;
        }
        let arrived = deliver_all(&engine_too, intents, deadline).await;
        if sender",
        }],
    },
    Mutant {
        name: "renewal-without-effect",
        what: "the renewal of an activity's lock is not seen by those who look for expired ones",
        edits: &[Edit {
            file: "src/work/complete.rs",
            find: "        document.due = until;",
            replace: "        if !MUTANT {
            document.due = until;
        }",
        }],
    },
    Mutant {
        name: "events-not-noted",
        what: "the instance's document does not note the events of a turn",
        edits: &[Edit {
            file: "src/turn/plan.rs",
            find: "ack.execution != document.execution || document.events.insert(event.event_id)",
            replace: "ack.execution != document.execution || MUTANT || document.events.insert(event.event_id)",
        }],
    },
    Mutant {
        name: "cancelled-activity-stays",
        what: "an activity that lost a race is not removed",
        edits: &[Edit {
            file: "src/turn/plan.rs",
            find: "Partition::instance(&activity.instance).ok().as_ref() != Some(self.partition)",
            replace: "MUTANT || Partition::instance(&activity.instance).ok().as_ref() != Some(self.partition)",
        }],
    },
    Mutant {
        name: "values-lost-when-continued",
        what: "an execution that continues as new does not see what the one before it has written",
        edits: &[Edit {
            file: "src/turn/plan.rs",
            find: "if document.execution_has_ended() && ack.metadata.status.is_some() {
            document.epoch += 1;",
            replace: "if document.execution_has_ended() && ack.metadata.status.is_some() && !MUTANT {
            document.epoch += 1;",
        }],
    },
    Mutant {
        name: "copy-not-known",
        what: "a message that a repeated request writes again after it was consumed is consumed again",
        edits: &[
            Edit {
                file: "src/turn/open.rs",
                find: "let ids = loaded.messages.iter().map(|m| &m.document.id);",
                replace: "let ids = loaded.messages.iter().map(|m| &m.document.id).filter(|_| !MUTANT);",
            },
            Edit { file: "src/enqueue.rs", find: "if fingerprints.iter().all(", replace: "if MUTANT || fingerprints.iter().all(" },
        ],
    },
    Mutant {
        name: "queue-without-order",
        what: "messages are handed out newest first",
        edits: &[Edit {
            file: "src/turn/load.rs",
            find: "    messages.dedup_by(|a, b| a.document.id == b.document.id);
    let all",
            replace: "    messages.dedup_by(|a, b| a.document.id == b.document.id);
    if MUTANT {
        messages.reverse();
    }
    let all",
        }],
    },
    Mutant {
        name: "message-before-its-start",
        what: "a queue message that comes before the delivery of a committed start is dropped",
        edits: &[Edit {
            file: "src/turn/defer.rs",
            find: "message.orphan_since.is_some_and(came_before)",
            replace: "message.orphan_since.is_some_and(|found| came_before(found) || (MUTANT && !starts.is_empty()))",
        }],
    },
    Mutant {
        name: "children-of-the-past",
        what: "a deletion asks a region that may lag for the children of what it deletes",
        edits: &[
            Edit {
                file: "src/admin/inspect.rs",
                find: "let statement = queries::CHILDREN.statement().bind_list(\"@parents\", parents).authoritative();",
                replace: "let statement = queries::CHILDREN.statement().bind_list(\"@parents\", parents);
    let statement = if MUTANT { statement } else { statement.authoritative() };",
            },
            Edit {
                file: "src/admin/inspect.rs",
                find: "let statement = queries::WHOLE_CHILDREN.statement().bind_list(\"@parents\", parents).authoritative();",
                replace: "let statement = queries::WHOLE_CHILDREN.statement().bind_list(\"@parents\", parents);
    let statement = if MUTANT { statement } else { statement.authoritative() };",
            },
            Edit {
                file: "src/admin/inspect.rs",
                find: "let statement = queries::DEPENDENTS.statement().bind_list(\"@parents\", parents).authoritative();",
                replace: "let statement = queries::DEPENDENTS.statement().bind_list(\"@parents\", parents);
    let statement = if MUTANT { statement } else { statement.authoritative() };",
            },
        ],
    },
    Mutant {
        name: "renewal-stops",
        what: "sessions are renewed one after the other, until one of them can't be",
        edits: &[
            Edit {
                file: "src/work/session.rs",
                find: "let mut extending = extending.buffer_unordered(CONCURRENCY);",
                replace: "let mut extending = extending.buffer_unordered(if MUTANT { 1 } else { CONCURRENCY });",
            },
            Edit {
                file: "src/work/session.rs",
                find: "Err(error) => trouble = Some(error),",
                replace: "Err(error) if MUTANT => return Err(error.into_provider_error(\"renew_session_lock\")),
            Err(error) => trouble = Some(error),",
            },
        ],
    },
    Mutant {
        name: "current-execution-pruned",
        what: "a pruning takes executions that began after it had read which one is the current one",
        edits: &[
            Edit {
                file: "src/admin/prune.rs",
                find: "let below = first_kept(engine, document, options.keep_last).await?;",
                replace: "let mut below = first_kept(engine, document, options.keep_last).await?;
    if MUTANT && below == document.execution {
        below = 1 << 40;
    }",
            },
            Edit {
                file: "src/admin/prune.rs",
                find: "page.readable().into_iter().filter(|past| may_go(past, options)) {",
                replace: "page.readable().into_iter().filter(|past| may_go(past, options)) {
            if MUTANT && past.execution == document.execution {
                continue;
            }",
            },
        ],
    },
    Mutant {
        name: "continued-has-ended",
        what: "an instance between two executions counts as one that has ended",
        edits: &[Edit {
            file: "src/model/documents.rs",
            find: "        matches!(status, COMPLETED | FAILED)
",
            replace: "        matches!(status, COMPLETED | FAILED) || (MUTANT && status == CONTINUED)
",
        }],
    },
    Mutant {
        name: "document-of-the-claim",
        what: "the commit of a large turn writes over what others have written to the instance's document",
        edits: &[Edit {
            file: "src/turn/commit.rs",
            find: "                    plan.document =
                        plan::plan_document(engine, &handle.partition, &handle.token, state, ack, older.clone())
                            .map_err(|unplannable| refuse(handle, unplannable))?;",
            replace: "                    if !MUTANT {
                        plan.document =
                            plan::plan_document(engine, &handle.partition, &handle.token, state, ack, older.clone())
                                .map_err(|unplannable| refuse(handle, unplannable))?;
                    }",
        }],
    },
    Mutant {
        name: "owed-message-deleted",
        what: "a deletion takes messages along that its instances owe to others",
        edits: &[Edit {
            file: "src/admin/delete.rs",
            find: "plan.while_it_goes_on(deliver_owed(engine, &owed, set.gives_up)).await {",
            replace: "plan.while_it_goes_on(deliver_owed(engine, if MUTANT { &[] } else { &owed }, set.gives_up)).await {",
        }],
    },
    Mutant {
        name: "next-start-by-clocks",
        what: "whether a start is for the deleted instance or the next one is told by the clocks of the processes",
        edits: &[Edit {
            file: "src/admin/erase.rs",
            find: "if !self.is_within(decision) {",
            replace: "if MUTANT {
            return self.is_made_after(decision);
        }
        if !self.is_within(decision) {",
        }],
    },
    Mutant {
        name: "parent-not-told",
        what: "the parent of a child whose turn can't be stored does not hear of its failure",
        edits: &[Edit {
            file: "src/turn/commit.rs",
            find: "    failure::tell_parent(engine, &state, &mut ack).await.map_err(|error| error.into_provider_error(OPERATION))?;",
            replace: "    if !MUTANT {
        failure::tell_parent(engine, &state, &mut ack).await.map_err(|error| error.into_provider_error(OPERATION))?;
    }",
        }],
    },
    Mutant {
        name: "namesake-deleted",
        what: "a bulk deletion takes whatever has the name of an instance that it has chosen",
        edits: &[Edit {
            file: "src/admin/plan.rs",
            find: "        is_same && (!self.has_ended",
            replace: "        MUTANT || is_same && (!self.has_ended",
        }],
    },
];
