//! Writes a paged cache, attends to it, and compares with a plain loop.
use pykv_sys::*;
use std::ptr::{null, null_mut};

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD: usize = 16;
const BLOCK: usize = 4;
const BLOCKS: usize = 3;
const TOKENS: usize = 7;
const CELLS: usize = BLOCKS * BLOCK * KV_HEADS * HEAD;

fn noise(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1664525).wrapping_add(1013904223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

fn write_cache(k: &[f32], v: &[f32], kc: &mut [f32], vc: &mut [f32], slots: &[i64]) -> Result<(), String> {
    let key = View::of(k, &[TOKENS, KV_HEADS, HEAD]);
    let value = View::of(v, &[TOKENS, KV_HEADS, HEAD]);
    let mut key_cache = View::of_mut(kc, &[BLOCKS, BLOCK, KV_HEADS, HEAD]);
    let mut value_cache = View::of_mut(vc, &[BLOCKS, BLOCK, KV_HEADS, HEAD]);
    let slot_mapping = View::of(slots, &[slots.len()]);
    // SAFETY: the views outlive the call, and describe memory that is theirs.
    check(unsafe {
        pykv_reshape_and_cache_flash(
            key.as_ptr(),
            value.as_ptr(),
            key_cache.as_mut_ptr(),
            value_cache.as_mut_ptr(),
            slot_mapping.as_ptr(),
            c"auto".as_ptr(),
            null(),
            null(),
            null_mut(),
        )
    })
}

#[test]
fn the_library_is_not_older_than_the_declarations() {
    assert!(unsafe { pykv_version() } >= 100);
}

#[test]
fn decode_equals_a_plain_loop() {
    let (k, v) = (noise(TOKENS * KV_HEADS * HEAD, 1), noise(TOKENS * KV_HEADS * HEAD, 2));
    let q = noise(HEADS * HEAD, 3);
    let table = [2i32, 0];
    let slots: Vec<i64> = (0..TOKENS).map(|t| (table[t / BLOCK] as usize * BLOCK + t % BLOCK) as i64).collect();
    let (mut kc, mut vc) = (vec![f32::NAN; CELLS], vec![f32::NAN; CELLS]); // what is not written must not be read
    write_cache(&k, &v, &mut kc, &mut vc, &slots).unwrap();

    let mut out = vec![f32::NAN; HEADS * HEAD];
    let mut result = View::of_mut(&mut out, &[1, HEADS, HEAD]);
    let query = View::of(&q, &[1, HEADS, HEAD]);
    let key_cache = View::of(&kc, &[BLOCKS, BLOCK, KV_HEADS, HEAD]);
    let value_cache = View::of(&vc, &[BLOCKS, BLOCK, KV_HEADS, HEAD]);
    let block_tables = View::of(&table, &[1, 2]);
    let lens = [TOKENS as i32];
    let seq_lens = View::of(&lens, &[1]);
    // SAFETY: as above.
    check(unsafe {
        pykv_paged_attention(
            result.as_mut_ptr(),
            query.as_ptr(),
            key_cache.as_ptr(),
            value_cache.as_ptr(),
            block_tables.as_ptr(),
            seq_lens.as_ptr(),
            &pykv_paged_attention_options::default(),
            null_mut(),
        )
    })
    .unwrap();

    for head in 0..HEADS {
        let row = |data: &[f32], t: usize, d: usize| data[(t * KV_HEADS + head / (HEADS / KV_HEADS)) * HEAD + d] as f64;
        let weights: Vec<f64> = (0..TOKENS)
            .map(|t| (0..HEAD).map(|d| q[head * HEAD + d] as f64 * row(&k, t, d)).sum::<f64>())
            .map(|logit| (logit / (HEAD as f64).sqrt()).exp())
            .collect();
        for d in 0..HEAD {
            let wanted: f64 =
                (0..TOKENS).map(|t| weights[t] * row(&v, t, d)).sum::<f64>() / weights.iter().sum::<f64>();
            let got = out[head * HEAD + d] as f64;
            assert!((got - wanted).abs() < 1e-5, "head {head}, element {d}: {got} instead of {wanted}");
        }
    }
}

#[test]
fn a_slot_outside_the_cache_is_an_error() {
    let (k, v) = (noise(TOKENS * KV_HEADS * HEAD, 4), noise(TOKENS * KV_HEADS * HEAD, 5));
    let (mut kc, mut vc) = (vec![0.0; CELLS], vec![0.0; CELLS]);
    let message = write_cache(&k, &v, &mut kc, &mut vc, &[(BLOCKS * BLOCK) as i64]).unwrap_err();
    assert!(message.contains("slot_mapping"), "{message}");
    assert!(kc.iter().chain(&vc).all(|&x| x == 0.0));
}

#[test]
fn memory_of_a_device_has_its_number() {
    let nothing = std::ptr::null::<BFloat16>();
    // SAFETY: an array without elements.
    let view = unsafe { View::on_device(nothing, &[0, 8], cuda(1)) };
    let tensor = unsafe { &*view.as_ptr() };
    assert_eq!((tensor.device.device_type, tensor.device.device_id), (2, 1));
    assert_eq!((tensor.dtype.code, tensor.dtype.bits), (4, 16));
}
