"""Texts and chats as samples: files to records, records to tokens with marks on those that are
trained, tokens packed into rows.

Reading order: `keys` (what [data] says about it), `files` (records with their places), `messages`
(records as chats), `tokenizer` and `spans` (tokens, and which are trained), `packing`, `store` (all
of it once, into a cache), `samples` (batches), `check` (do model and data fit?), `command`
(`shardwise data`). A batch is a dict of int64 tensors [B, T]:

    input_ids     documents one behind the other, then padding
    labels        the token itself where it is trained, else -100; the loss shifts by one, so the
                  first token of each document is never trained
    position_ids  begin again at 0 with each document, and with the padding
"""
